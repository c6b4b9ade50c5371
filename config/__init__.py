"""Settings: module-level lines of a script, then a config file, then --key=value on the command line (--key alone
is --key=True).

A setting is a line `name = value  # comment` at the top level of a script (train.py, sample.py, ...) or a field of
a method's config class. Its default gives its type, its comment is its help text.
"""
import ast
import dataclasses
import datetime
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import re
import runpy
import sys
import typing
from collections import namedtuple


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# settings that may name a file
PATHS = {'out_dir', 'init_from', 'checkpoint', 'dataset', 'prompt_file', 'html', 'test_set', 'output'}
GPT2 = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # on the hub without an organisation
COMMAND_LINE = 'command line'
# name = value  # comment, or name: type = value  # comment
SETTING = re.compile(r'^ *([a-z]\w*|[A-Z])(?:: [^=]+?)? = (.+?) +# (.+)$', re.MULTILINE)
TYPE_NAMES = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
              tuple: 'numbers separated by commas'}
BOOLS = {'true': True, '1': True, 'false': False, '0': False}

Setting = namedtuple('Setting', 'default types comment')  # types: those that a value may have


class UserError(ValueError):
    """A setting, file or input is at fault. The message is one line: what, which value, the way out."""

    def __str__(self):
        return ' '.join(super().__str__().splitlines())  # it may quote another error, of several lines


def check_range(settings, names, low=1, below=math.inf):
    """Raises UserError for the first of the names (separated by spaces) whose value is not in [low, below)."""
    for name in names.split():
        if not low <= settings[name] < below:  # nan and inf are in no range
            top = '' if below == math.inf else f' and below {below}'
            raise UserError(f'{name} = {settings[name]}: must be at least {low}{top}')


def check_choice(settings, name, choices):
    """Raises UserError if settings[name] is not one of the choices (separated by spaces)."""
    if settings[name] not in choices.split():
        raise UserError(f'{name} = {settings[name]!r}: choose {", ".join(choices.split())}')


def check_sampling(prompts, temperature, top_k, top_p):
    """Raises UserError for a prompt (token list) that is empty or a setting of sampling out of range."""
    if not prompts or not all(len(p) for p in prompts):
        raise UserError('the prompt is empty: give at least one token')
    for name, value, valid in [('temperature', temperature, temperature >= 0), ('top_k', top_k, top_k >= 0),
                               ('top_p', top_p, 0 < top_p <= 1)]:
        if not valid:
            raise UserError(f'{name} = {value}: temperature and top_k are 0 or more, top_p is in (0, 1]')


def need(package, what):
    """An optional package. Raises UserError."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f'{what} needs the {package} package: pip install {package}') from None


def read_json(path):
    """The object in a JSON file, {} where there is no file. Raises UserError."""
    try:
        with open(path, encoding='utf-8') as f:
            found = json.load(f)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read ({e})') from e
    if not isinstance(found, dict):
        raise UserError(f'{path} does not hold an object')
    return found


# --- what settings there are ---

def script_settings(path):
    """The settings of a script, {name: Setting}, read from its source so that nothing has to be run."""
    with open(path, encoding='utf-8') as f:
        head = re.split(r'^(?:def|class) ', f.read(), maxsplit=1, flags=re.MULTILINE)[0]
    settings = {}
    for name, value, comment in SETTING.findall(head):
        default = ast.literal_eval(value)
        settings[name] = Setting(default, (type(default),), comment)
    return settings


@functools.cache
def class_settings(config_class):
    """The settings of a method's config class, inherited fields included: {name: Setting}."""
    comments = {}
    for base in reversed(config_class.__mro__[:-1]):
        comments.update((name, comment) for name, _, comment in SETTING.findall(inspect.getsource(base)))
    return {f.name: Setting(f.default, typing.get_args(f.type) or (f.type,), comments.get(f.name, ''))
            for f in dataclasses.fields(config_class)}


# --- what their values are ---

def convert(name, value, setting, where):
    """`value` as the setting's type: text of the command line, or a config file's value, read as if written
    there. Raises UserError."""
    for kind in sorted(setting.types, key=lambda t: t is str):  # text last: it takes anything
        try:
            if kind is not str:
                return parse(value if isinstance(value, str) else repr(value), kind)
            if isinstance(value, str):
                return value
        except (ValueError, KeyError, OverflowError):  # float of a whole number may overflow
            pass
    expected = ' or '.join(TYPE_NAMES[t] for t in setting.types)
    raise UserError(f'{where}: {name} = {value!r}: expected {expected}, such as {setting.default!r} '
                    f'({setting.comment})')


def parse(text, kind):
    """Text as bool, int, float or tuple of numbers. Raises ValueError, KeyError or OverflowError."""
    text = text.strip()
    if kind is bool:
        return BOOLS[text.lower()]
    if kind is tuple:
        return tuple(number(part) for part in text.strip('()[]').split(',') if part.strip())
    value = number(text)
    if kind is float:
        return float(value)
    if int(value) != value:  # 1e5 is a whole number too
        raise ValueError
    return int(value)


def number(text):
    """Text as int or finite float. Raises ValueError."""
    if re.fullmatch(r' *[+-]?\d[\d_]* *', text):
        return int(text)
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def load(script, argv, methods={}, method_of=None, of_training={}):
    """Settings of `script` after config files and command line: (the script's, those given of the method's config,
    {name: where it was given}). Raises UserError on an unknown name or a value of the wrong type; --help prints
    the settings and exits.

    methods: {name: config class} where the setting `method` chooses whose fields are settings too; where it is not
    given, method_of(settings of the script) may know it, from a checkpoint, or return None. of_training: the
    settings of training, {name: Setting}, for a script that reads what a run has written: of a config file that
    holds one of them which the script lacks, its out_dir alone counts. Paths in the script and in config files
    count from the repository, those of the command line from the current folder.
    """
    known = script_settings(script)
    if {'--help', '-h'} & {*argv}:
        print_help(script, known, methods)
        sys.exit(0)
    values = {}  # {name: (value, where it was given)}
    for arg in sorted(argv, key=lambda arg: arg.startswith('--')):  # the command line wins, wherever it stands
        if arg.startswith('--'):
            name, equals, value = arg[2:].partition('=')
            values[name] = value if equals else True, COMMAND_LINE
            continue
        names = read_config_file(arg)
        if (names.keys() & of_training.keys()) - known.keys():
            names = {'out_dir': names.get('out_dir', of_training['out_dir'].default)}
        values.update({name: (value, arg) for name, value in names.items()})
    given = {name: where for name, (_, where) in values.items()}

    # the script's own
    settings = {name: setting.default for name, setting in known.items()}
    for name in values.keys() & known.keys():
        value, where = values[name]
        settings[name] = convert(name, value, known[name], where)
    for name in PATHS & known.keys():
        if given.get(name) != COMMAND_LINE:
            settings[name] = from_repository(settings[name])

    # the method's
    known_model = {}
    if methods:
        saved_method = method_of and method_of(settings)
        if saved_method and 'method' not in given:
            settings['method'] = saved_method
        method = settings['method']
        if method not in methods:
            where = given.get('method', script)
            raise UserError(f'{where}: method = {method!r}: choose one of {", ".join(methods)}')
        known_model = class_settings(methods[method])
    model_settings = {}
    for name, (value, where) in values.items():
        if name in known_model:
            model_settings[name] = convert(name, value, known_model[name], where)
        elif name not in known:
            owners = [m for m, config_class in methods.items() if name in class_settings(config_class)]
            if owners:
                raise UserError(f'{where}: {name} is a setting of method {" or ".join(owners)}, not of {method}; '
                                f'add --method={owners[0]}')
            near = difflib.get_close_matches(name, [*known, *known_model], n=1)
            hint = f'did you mean {near[0]}?' if near else '--help lists the settings'
            raise UserError(f'{where}: there is no setting {name!r}; {hint}')
    return settings, model_settings, given


def on_hub(name):
    """Whether a name that is no file here may be that of a published model on the Hugging Face hub."""
    owner, _, model = name.partition('/')
    here = any(os.path.exists(path) for path in (owner, os.path.join(ROOT, owner), f'{ROOT}/config/{model}.py'))
    return name in GPT2 or bool(re.fullmatch(r'[\w.-]+/[\w.-]+', name)) and not name.endswith('.pt') and not here


def from_repository(path):
    """A path that counts from the repository, as seen from the current folder. Names without a slash stay."""
    if '/' not in path or on_hub(path) or os.path.isabs(path) or os.getcwd() == ROOT:
        return path
    return os.path.join(ROOT, path)


def read_config_file(path):
    """The public names a config file defines. Raises UserError if it is missing or does not run."""
    if not os.path.isfile(path) or not path.endswith('.py'):
        folder = os.path.dirname(path) or '.'
        files = [f for f in os.listdir(folder) if f.endswith('.py')] if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(path), files, n=1)
        hint = f'did you mean {os.path.join(folder, near[0])}? ' if near else ''
        raise UserError(f'config file {path!r} is not there or is not a .py file; {hint}settings are given as '
                        '--key=value')
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as e:
        raise UserError(f'config file {path} does not run: {type(e).__name__}: {e}') from e
    return {name: value for name, value in names.items()
            if not name.startswith('_') and not inspect.ismodule(value)}


def print_help(script, known, methods):
    print(f'python {os.path.basename(script)} [config file] [--key=value ...]\n\nsettings')
    print_settings(known)
    printed = {*known}
    for method, config_class in methods.items():
        new = {name: s for name, s in class_settings(config_class).items() if name not in printed}
        printed.update(new)
        if new:
            print(f'model settings of method {method}')
        print_settings(new)


def print_settings(settings):
    for name, s in settings.items():
        default = ','.join(map(str, s.default)) if s.types == (tuple,) else str(s.default).replace('\n', '\\n')
        print(f'  --{name}={default}'.ljust(36), s.comment)


# --- running a script ---

def is_terminal(stream):
    """Whether somebody watches: a notebook's stream may not know, and a service may have none."""
    return bool(stream and getattr(stream, 'isatty', bool)())


def launch(main):
    """Run a script's main(argv); a UserError ends it with one line and status 1, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):  # a terminal that cannot show a character gets '?', not a crash
            stream.reconfigure(errors='replace')
    try:
        main(sys.argv[1:])
    except UserError as e:
        complain(f'error: {e}')
        sys.exit(1)
    except RuntimeError as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        if type(e).__name__ == 'OutOfMemoryError' or "can't allocate memory" in reason:
            complain(f'error: out of memory ({reason}): lower batch_size (and raise grad_accum as much), '
                     "block_size, or the model's size")
            os._exit(1) if 'RANK' in os.environ else sys.exit(1)
        if 'RANK' not in os.environ or not ('gloo' in reason or type(e).__name__.startswith('Dist')):
            raise
        complain('error: the connection to another process of this run broke; see what the others say', reason)
        os._exit(1)  # an ordinary exit would wait for the others, who are gone
    except KeyboardInterrupt:
        complain('interrupted')
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def complain(message, detail=''):
    """Print a message to stderr; of torchrun's processes with the same one, the first speaks for all."""
    if 'RANK' in os.environ:
        import torch.distributed as dist
        try:
            store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False,
                                  timeout=datetime.timedelta(seconds=5))
            if store.add(message, 1) > 1:
                return
        except Exception:
            pass  # without torchrun's store everybody speaks
    print(message + (f' ({detail})' if detail else ''), file=sys.stderr, flush=True)
