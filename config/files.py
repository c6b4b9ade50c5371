"""Files that are written whole or not at all; the log of a run."""
import contextlib
import json
import os
import time
from glob import escape, glob

from config import UserError


@contextlib.contextmanager
def whole_file(path):
    """A binary file to write; it takes the place of `path` when the block ends, so that is whole at every moment.
    A symbolic link is written through. Raises UserError if the disk refuses; the old file is then untouched."""
    target = os.path.realpath(path)
    temporary = f'{target}.{os.getpid()}.tmp'  # its own name: runs that start together may write the same file
    try:
        with open(temporary, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, target)
        for old in glob(escape(target) + '.*.tmp'):  # of killed runs; a younger one may be another run's
            with contextlib.suppress(OSError):
                if os.path.getmtime(old) < time.time() - 24 * 3600:
                    os.remove(old)
    except (OSError, RuntimeError) as e:  # torch's zip writer turns a full disk into a RuntimeError
        raise UserError(f'cannot write {path}: {e}; the file of the last save is untouched') from e
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_file(path, content):
    """Write bytes or text (as UTF-8, lines ending in \\n)."""
    with whole_file(path) as f:
        f.write(content if isinstance(content, bytes) else content.encode('utf-8'))


def read_log(path):
    """The entries of log.jsonl; a line that a crash left broken is passed over."""
    entries = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                print(f'{path}: passing over a broken line')
                continue
            if isinstance(entry, dict) and type(entry.get('iter')) is int:
                entries.append(entry)
    return entries
