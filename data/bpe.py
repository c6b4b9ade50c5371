"""Tokenizers of published models: byte pair encoding (BPE) joins bytes to tokens, frequent pairs first."""
import json
import math
import os
from itertools import takewhile

from config import UserError, need, read_json

# how a text is cut into pieces before its bytes are joined; | tries from left to right
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# SmolLM2: GPT-2's after each digit was cut out, so spaces before one are not parted
DIGITS = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")


class Tiktoken:
    """A tiktoken encoding of n ids. Special tokens are never made from a text. Ids from n on stand for bytes that
    the vocabulary lacks."""

    def __init__(self, encoding, n, end=None):
        self.encoding = encoding
        self.n = n
        self.end = end  # the token that ends a document, where the encoding says it

    def encode(self, text):
        try:
            ids = self.encoding.encode_ordinary(text)
        except BaseException as e:  # Rust's PanicException is no Exception
            if type(e).__name__ != 'PanicException':
                raise
            raise UserError('the text has a run of spaces or of other like characters that is too long for the '
                            'tokenizer') from None
        if ids and max(ids) >= self.n:
            lacking = {self.encoding.decode_single_token_bytes(i) for i in ids if i >= self.n}
            raise UserError(f'the tokenizer has no {", ".join(map(repr, sorted(lacking)))}: take these bytes out '
                            'of the text')
        return ids

    def decode(self, ids):  # bytes, since a character may be spread over several tokens
        return b''.join(map(self.encoding.decode_single_token_bytes, ids)).decode('utf-8', errors='replace')


class HuggingFace:
    """A tokenizer.json as the tokenizers package reads it. Special tokens are never made from a text."""

    def __init__(self, text):
        tokenizers = need('tokenizers', "this model's tokenizer")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as e:
            raise UserError(f'tokenizer.json cannot be read ({e})') from e
        self.tokenizer.encode_special_tokens = True  # as the text that they look like
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.n = max(self.tokenizer.get_vocab().values()) + 1
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {i: token.content for i, token in added.items() if token.special}

    def encode(self, text):
        text = text.encode('utf-8', 'replace').decode()  # half a character, which a command line may hold, is a ?
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if made := self.special.keys() & {*ids}:  # for what it cannot write, or by a rule of its own
            raise UserError(f'the tokenizer makes its special token {self.special[min(made)]} of the text '
                            f'{text[:60]!r}')
        return ids

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def same_tokens(a, b):
    """Whether two readers of the above give the same ids for every text: GPT-2's own and its published file."""
    if not (isinstance(a, Tiktoken) and isinstance(b, Tiktoken) and a.n == b.n):
        return False
    a, b = a.encoding, b.encoding
    patterns = {encoding._pat_str for encoding in (a, b) if encoding.name != 'gpt2'}
    return a._mergeable_ranks == b._mergeable_ranks and patterns <= {GPT2}


def gpt2_tokens(spec):
    import tiktoken  # only here: it fetches the vocabulary from the net at first use
    try:
        encoding = tiktoken.get_encoding('gpt2')
        return Tiktoken(encoding, encoding.n_vocab, encoding.eot_token)
    except Exception as e:
        raise UserError(f'the gpt2 vocabulary could not be loaded ({type(e).__name__}): tiktoken fetches it once; '
                        'offline, set TIKTOKEN_CACHE_DIR to a folder that has it') from e


def json_tokens(spec):
    """tokenizer.json by tiktoken where that is exactly the same, as was found when it was read first (`tiktoken`
    in the spec); else by the tokenizers package."""
    text = spec.get('json')
    try:
        return as_tiktoken(json.loads(text)) if spec.get('tiktoken') else HuggingFace(text)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f'the tokenizer is damaged ({type(e).__name__}: {e})') from e


def pattern_of(pre):
    """The regular expression that cuts as a pre_tokenizer does, None for one that is not known here."""
    *steps, last = pre['pretokenizers'] if pre['type'] == 'Sequence' else [pre]
    if last['type'] != 'ByteLevel' or last['add_prefix_space']:
        return None
    if last.get('use_regex', True):
        if not steps:
            return GPT2
        return DIGITS if steps == [{'type': 'Digits', 'individual_digits': True}] else None
    known = {'type': 'Split', 'pattern': {'Regex': LLAMA3}, 'behavior': 'Isolated', 'invert': False}
    return LLAMA3 if steps == [known] else None


def byte_alphabet():
    """{character: byte}: tokenizer.json writes a byte as a printable character, itself or one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def ranks_of(parsed):
    """(token bytes -> id, name of a special token -> id) of a tokenizer.json (parsed)."""
    byte = byte_alphabet()
    special = {token['content']: token['id'] for token in parsed['added_tokens']}
    return {bytes(byte[ch] for ch in token): i for token, i in parsed['model']['vocab'].items()
            if token not in special}, special


def as_tiktoken(parsed):
    """A tokenizer.json (parsed) of byte-level BPE as Tiktoken."""
    import tiktoken
    ranks, special = ranks_of(parsed)
    n = len(ranks) + len(special)
    lacking = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
    ranks.update((b, n + i) for i, b in enumerate(lacking))
    return Tiktoken(tiktoken.Encoding('published', pat_str=pattern_of(parsed['pre_tokenizer']),
                                      mergeable_ranks=ranks, special_tokens=special), n)


def is_tiktoken(parsed):
    """Whether tiktoken's encoding equals that of a tokenizer.json (parsed), always. tiktoken joins the two
    neighbours whose union has the lowest id, whatever the list of merges says, and takes a piece that is a token
    as it is."""
    try:
        model = parsed['model']
        odd = [parsed.get('normalizer'), model.get('dropout'), model.get('byte_fallback'),
               model.get('continuing_subword_prefix'), model.get('end_of_word_suffix')]
        odd += [not token['special'] for token in parsed['added_tokens']]  # such a one is cut out of a text
        if model.get('ignore_merges'):  # then one in the vocabulary is made of its text
            odd += [token['content'] in model['vocab'] for token in parsed['added_tokens']]
        if model['type'] != 'BPE' or any(odd) or not pattern_of(parsed['pre_tokenizer']):
            return False
        ranks, special = ranks_of(parsed)
        byte = byte_alphabet()
        merges = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
        merges = [tuple(bytes(byte[ch] for ch in part) for part in merge) for merge in merges]
        order = [ranks[a + b] for a, b in merges]
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    ids = sorted([*ranks.values(), *special.values()])
    if order != sorted(order) or ids != list(range(len(ids))):
        return False
    # each token must come about by a merge in the list; then no other pair can ever stand for it
    listed = {*merges}
    for token in ranks:
        parts = joined(token, ranks)
        if len(token) > 1 and tuple(parts) not in listed and not (len(parts) > 2 and model.get('ignore_merges')):
            return False
    return True


def joined(token, ranks):
    """What tiktoken's rule leaves of a token (bytes) before the last merge."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, math.inf), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank == math.inf:
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def published_spec(folder, end, bos):
    """What data.Tokenizer reads of a published model's folder. end: config.json's id after a document. bos: its id
    for the beginning, which the model need not have seen there."""
    path = os.path.join(folder, 'tokenizer.json')
    parsed = read_json(path)
    if not parsed:
        raise UserError(f'{path} is missing: the model cannot be given a text without it')
    with open(path, encoding='utf-8') as f:
        spec = {'kind': 'json', 'json': f.read(), 'tiktoken': is_tiktoken(parsed)}
    # what a document opens with: tokenizer.json says it as a template, some files only in tokenizer_config.json
    try:
        post = parsed.get('post_processor') or {}
        template = [p for p in post.get('processors', [post]) if p.get('type') == 'TemplateProcessing']
        other = read_json(os.path.join(folder, 'tokenizer_config.json'))
        spec['begin'] = []
        if template:
            pieces = takewhile(lambda piece: 'SpecialToken' in piece, template[0]['single'])
            for piece in pieces:
                spec['begin'] += template[0]['special_tokens'][piece['SpecialToken']['id']]['ids']
        elif other.get('add_bos_token') is True:
            token = other['bos_token']
            name = token['content'] if isinstance(token, dict) else token
            spec['begin'] = [token['id'] for token in parsed['added_tokens'] if token['content'] == name]
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f'{path} or tokenizer_config.json is damaged ({e!r})') from e
    if '"Strip"' in json.dumps(parsed.get('decoder')):
        raise UserError(f'{path}: a tokenizer that puts a space before each text is not supported')
    end = end[0] if isinstance(end, list) and end else end
    n = json_tokens(spec).n
    if not spec['begin'] and type(bos) is int and 0 <= bos < n:
        spec['bos'] = bos
    if type(end) is int and 0 <= end < n:
        spec['end'] = end
    return spec
