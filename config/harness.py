"""A checkpoint in lm-evaluation-harness, which needs pip install lm_eval:

    python -m config.harness --checkpoint=gpt2 --tasks=mmlu
"""
import config
import train
from config.likelihood import log_likelihood
from data import zeroshot

checkpoint = ''  # a checkpoint's path, a run's folder, or a published model
tasks = ''  # names of the harness's tasks, separated by commas
limit = 0  # rows of each task, 0 = all
batch_size = 32  # rows at once
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps


def adapter(model, tokenizer, batch_size):
    """The model as an object of the harness's own class of models, which exists only where it is installed."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Adapter(LM):
        def loglikelihood(self, requests):
            rows = [zeroshot.Row(context.rstrip(), [context[len(context.rstrip()):] + text], 0)
                    for context, text in (request.args for request in requests)]
            return log_likelihood(model, *zeroshot.encode(tokenizer, rows, 'harness', 'harness'), batch_size)

        def loglikelihood_rolling(self, requests):
            return [sum(log_p for log_p, _ in log_likelihood(model, *self.windows(*request.args), batch_size))
                    for request in requests]

        def windows(self, text):
            ids = zeroshot.opening(tokenizer, 'harness')[-1:] + tokenizer.encode(text)
            pairs = [make_disjoint_window(window) for window in
                     get_rolling_token_windows(ids[1:], ids[0], model.config.block_size, 1)]
            return [context for context, _ in pairs], [part for _, part in pairs]

        def generate_until(self, requests):
            return [self.write(*request.args) for request in requests]

        def write(self, context, settings):
            prompt = tokenizer.begin + tokenizer.encode(context)
            length = settings.get('max_gen_toks', 256)
            temperature = float(settings.get('temperature', 0)) if settings.get('do_sample') else 0.0
            if hasattr(model, 'answers'):
                ids = model.answers([prompt], length, temperature)[-1][0][0][0]
            else:
                ids = model.complete([prompt], length, temperature=temperature, n_text=tokenizer.n_text,
                                     stop_token=tokenizer.end)[0]
            text = tokenizer.decode([i for i in ids if i != tokenizer.end])
            until = settings.get('until') or []
            for stop in [until] if isinstance(until, str) else until:
                text = text.partition(stop)[0] if stop else text
            return text

    return Adapter()


def main(argv):
    settings = config.load(__file__, argv)[0]
    config.check_range(settings, 'batch_size')
    config.check_range(settings, 'limit', 0)
    lm_eval = config.need('lm_eval', 'this script')
    model, tokenizer = train.load(settings['checkpoint'], settings['device'])
    found = lm_eval.simple_evaluate(adapter(model, tokenizer, settings['batch_size']),
                                    tasks=settings['tasks'].split(','), limit=settings['limit'] or None)
    print(config.need('lm_eval.utils', 'this script').make_table(found))


if __name__ == '__main__':
    config.launch(main)
