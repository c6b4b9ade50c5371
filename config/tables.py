"""Numbers as tables of text, as files and as pictures."""
import json
import os

from config.files import write_file

POINTS = ('block states',)  # tables for the picture and the file, too long for the terminal


def formatted(value):
    if value is None:
        return '-'
    if not isinstance(value, float):
        return str(value)
    return f'{value:.4f}' if value == 0 or 1e-4 <= abs(value) < 1e5 else f'{value:.1e}'


def print_numbers(numbers, unit):
    """unit: of what is named a loss."""
    tables = {name: value for name, value in numbers.items() if isinstance(value, list)}
    for name, value in numbers.items():
        if name not in tables:
            print(f'{name:32s} {formatted(value):>12s}' + f' {unit}' * ('loss' in name))
    for name, table in tables.items():
        if name in POINTS or not table:
            continue
        widths = [max(len(column), *(len(formatted(row[column])) for row in table)) for column in table[0]]
        print('\n' + name + '\n' + '  '.join(column.rjust(w) for column, w in zip(table[0], widths)))
        for row in table:
            print('  '.join(formatted(value).rjust(w) for value, w in zip(row.values(), widths)))


def write_numbers(target, numbers, title, **about):
    """Write `target`.json, with what else is known about the numbers, and the picture; say so."""
    os.makedirs(os.path.dirname(target) or '.', exist_ok=True)
    write_file(target + '.json', json.dumps({**about, **numbers}, indent=1))
    print(f'\nwritten to {target}.json' + (f' and {target}.png' if draw(numbers, title, target + '.png') else ''))


def draw(numbers, title, path):
    """A panel per table: its second column over its first, the third as colour for POINTS; of a table named "...
    over ..." every column over its first. Returns whether it drew."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use('Agg')
    matplotlib.rcParams['text.parse_math'] = False  # a name's $ begins no formula
    from matplotlib import pyplot
    tables = {name: value for name, value in numbers.items()
              if isinstance(value, list) and value and not isinstance(list(value[0].values())[1], str)}
    if not tables:
        return False
    figure, panels = pyplot.subplots(1, len(tables), figsize=(5 * len(tables), 4), squeeze=False,
                                     layout='constrained')
    for panel, (name, table) in zip(panels[0], tables.items()):
        x, y = list(table[0])[:2]
        across = [row[x] if isinstance(row[x], float) else str(row[x]) for row in table]
        if ' over ' in name:
            for column in list(table[0])[1:]:
                known = [(row[x], row[column]) for row in table if row[column] is not None]
                panel.plot([place for place, _ in known], [value for _, value in known], 'o-', label=column)
            panel.legend()
        elif name in POINTS:
            colour = list(table[0])[2]
            dots = panel.scatter(across, [row[y] for row in table], s=8, c=[row[colour] for row in table])
            figure.colorbar(dots, label=colour)
        else:
            panel.plot(across, [row[y] for row in table], 'o-')
        panel.set(title=name, xlabel=x, ylabel='' if ' over ' in name else y)
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)
    return True
