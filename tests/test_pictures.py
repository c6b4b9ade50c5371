"""What is shown: the page of coloured text, the curves of several runs."""
import html.parser
import re

import pytest

import data
import sample


class Page(html.parser.HTMLParser):
    """A page as its reader sees it: `texts`, one per <p>, of (what stands there, number below, under the pointer,
    background); `open` are the elements that nobody has closed."""

    def __init__(self, content):
        super().__init__()
        self.texts, self.open, self.styles = [], [], ''
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert not {'src', 'href'} & attributes.keys()  # it needs no other file
        if tag == 'p':
            self.texts.append([])
        if tag == 'ruby':
            self.texts[-1].append(['', '', attributes['title'], attributes['class']])
        if tag != 'meta':
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        place = self.open[-1] if self.open else ''
        if place == 'style':
            self.styles += text
        elif place == 'p':  # outside of a ruby nothing is known of the effort
            self.texts[-1].append([text, '', '', ''])
        elif place in ('ruby', 'rt'):
            self.texts[-1][-1][place == 'rt'] += text


def test_a_page_shows_every_text_with_its_numbers_and_escapes_it():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': sorted('\n"&<>ab')})
    texts = ['a<b>&"\na', 'ba']
    effort = [[None, 1, 2, 3, 9, 2, 1, 4], [1, 2]]
    page = Page(sample.page('<run> & more', tokenizer, [tokenizer.encode(text) for text in texts], effort, 'slots'))
    assert not page.open and len(page.texts) == 2
    for text, numbers, shown in zip(texts, effort, page.texts):
        assert ''.join(part for part, *_ in shown).replace('\u21b5', '') == text
        below = [number for part, number, *_ in shown if part != '\n']
        assert below == ['' if n is None else str(n) for n in numbers]
        told = [pointer for part, _, pointer, _ in shown if part != '\n']
        assert told == ['' if n is None else f'{c!r}, slots: {n}' for c, n in zip(text, numbers)]
    # the colours are those of a terminal: grey 255 and 55, a dark purple with white text; the last one serves all above
    assert '.e1 { background: rgb(238 238 238); color: rgb(0 0 0) }' in page.styles
    assert '.e7 { background: rgb(95 0 175); color: rgb(255 255 255) }' in page.styles
    assert [background for *_, background in page.texts[0]][:5] == ['', 'e1', 'e2', 'e3', 'e7']


@pytest.mark.parametrize('method', ['thoughtbubbles', 'cyb'])
def test_sample_writes_the_page_of_all_its_texts(run, tmp_path, capsys, method):
    run('run', method=method)
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path}/run', '--prompt=1 plus', '--max_new_tokens=8', '--num_samples=3', '--show',
                 f'--html={tmp_path}/page.html'])
    said = capsys.readouterr()
    texts = Page((tmp_path / 'page.html').read_text('utf-8')).texts
    assert len(texts) == 3 and said.err.endswith(f'written to {tmp_path}/page.html\n')
    for shown, printed in zip(texts, said.out.split('--- ')[1:]):
        assert ''.join(part for part, *_ in shown).replace('\u21b5', '') in printed
        numbers = re.findall(r"':(\d+)", printed)
        assert [number for _, number, *_ in shown if number] == numbers
        assert len(numbers) == (14 if method == 'thoughtbubbles' else 8)  # a prompt's slots are not known
