"""The demonstration behind ``make demo``: the same three texts, plain and speculative."""

from specla_jax.checkpoint import load_target
from specla_jax.config import DraftConfig
from specla_jax.decode import bundled_target, show_stream
from specla_jax.generate import GenerationResult, Stream, stream
from specla_jax.text import load_tokenizer

PROMPTS = (
    "Question: Tom has 5 boxes of pencils with 8 pencils in each box. He gives 10 pencils to his sister. How many "
    "pencils does he have left?\nAnswer:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read_lines(path):\n",
)
# A short chain: on a CPU every further node costs time, and prompt look-up is rarely right for longer.
DRAFT = DraftConfig(depth=5, branch=1, nodes=6)
LENGTH = 96


def demo() -> int:
    """Streams three continuations drafted by prompt look-up, decodes them again without drafts and compares.

    Returns:
      The exit status: 0 if the texts are equal.
    """
    folder = bundled_target()
    model = load_target(folder, dtype="float32")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None  # the bundled folder has one
    print(f"{folder.name}: {model.config.num_hidden_layers} layers, float32; compiling takes a moment\n", flush=True)

    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    options = {"max_new_tokens": LENGTH, "stop_token_ids": model.config.eos_token_ids}

    def drafted(ids: list[int]) -> Stream:
        return stream(model, [ids], method="chain", draft=DRAFT, **options)

    def plain(ids: list[int]) -> Stream:
        return stream(model, [ids], method="ar", **options)

    for pieces in (drafted(prompts[0]), plain(prompts[0])):
        finish(pieces)  # the first run of a program is slower than all others

    rows = []
    for ids in prompts:
        rows.append((show_stream(drafted(ids), ids, tokenizer), finish(plain(ids))))
        print("-" * 60)

    print(
        f"{'prompt':>6} {'tokens':>6} {'plain':>14} {'speculative':>14} {'speed-up':>8} {'accepted length':>15}  text"
    )
    for number, (fast, slow) in enumerate(rows, 1):
        speeds = [len(result.tokens[0]) / result.log.seconds for result in (slow, fast)]
        equal = fast.tokens == slow.tokens
        print(
            f"{number:>6} {len(fast.tokens[0]):>6} {speeds[0]:>8.1f} tok/s {speeds[1]:>8.1f} tok/s "
            f"{speeds[1] / speeds[0]:>8.2f} {fast.accepted_length[0]:>15.2f}  {'equal' if equal else 'DIFFERENT'}"
        )
    return 0 if all(fast.tokens == slow.tokens for fast, slow in rows) else 1


def finish(pieces: Stream) -> GenerationResult:
    """Runs a stream to its end without showing it."""
    for _ in pieces:
        pass
    return pieces.result
