"""Other makers' word problems as test records: GSM-Hard, SVAMP, ASDiv, MAWPS."""
import json
import re

from config import UserError
from data import read_text
from data.records import Record, check_object, parse_jsonl, parse_number, plain_number

# of these keys the first that an object has, capitals or not; the text of 'body', if any, goes before the question
QUESTION = 'question', 'input', 'squestion', 'problem'
ANSWER = 'answer', 'target', 'result', 'lsolutions'


def read_test_set(path):
    """Records without steps, from a JSON list of objects or a JSONL file. An answer is a number, a text such as
    '5', '9 (apples)' or '... #### 18', or a list of one of these; problems with another one are left out and
    counted. Raises UserError."""
    text = read_text(path)
    entries = parse_jsonl(text, path)
    if text.lstrip().startswith('['):
        try:
            entries = [(f'{path} entry {i}', entry) for i, entry in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path} is not JSON ({e})') from None
    found = [read_problem(entry, where) for where, entry in entries]
    usable = [record for record in found if record.answer]
    if not usable:
        raise UserError(f'{path} holds no problem whose answer is a number')
    if len(usable) < len(found):
        print(f'{path}: {len(found) - len(usable):,} of {len(found):,} problems are left out, since their answer '
              'is not a number')
    return usable


def read_problem(entry, where):
    """An object as a Record, its answer '' where it is not a number. Raises UserError where a key is missing."""
    entry = {key.lower(): value for key, value in check_object(entry, where).items()}
    question, answer = (next((key for key in keys if key in entry), None) for keys in (QUESTION, ANSWER))
    if not question or not answer or not isinstance(entry[question], str) or not entry[question].strip():
        raise UserError(f'{where}: a problem needs a text as {" or ".join(QUESTION)} and a number as '
                        f'{" or ".join(ANSWER)}; its keys are {", ".join(entry)}')
    text, answer = f'{entry.get("body") or ""} {entry[question]}', entry[answer]
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    said = str(answer) if type(answer) in (str, int, float) else ''
    said = re.sub(r'\([^()]*\)$', '', said.rpartition('####')[2].strip())
    number = parse_number(said)
    if number is not None and number.denominator == 1:  # 3.0 is written 3, as in training
        said = str(number)
    return Record(' '.join(text.split()), [], plain_number(said) if number is not None else '', where)
