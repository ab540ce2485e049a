"""The demonstration behind ``make demo``: the same three texts, plain and speculative."""

from specla_jax.checkpoint import load_target
from specla_jax.config import DraftConfig
from specla_jax.decode import bundled_drafter, bundled_target, show_stream
from specla_jax.drafters import get_drafter
from specla_jax.generate import GenerationResult, Method, Stream, stream
from specla_jax.text import load_tokenizer

PROMPTS = (
    "Question: Tom has 5 boxes of pencils with 8 pencils in each box. He gives 10 pencils to his sister. How many "
    "pencils does he have left?\nAnswer:",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __add__(self, other):\n",
    "def read_lines(path):\n",
)
# Few nodes and levels: on a CPU each of them costs time. A tree reaches as far as a chain of as many nodes with fewer
# levels, because it does not stop at the first wrong guess.
DRAFTS: dict[Method, DraftConfig] = {
    "ar": DraftConfig(depth=0, nodes=1),
    "chain": DraftConfig(depth=5, branch=1, nodes=6),
    "tree": DraftConfig(depth=4, branch=3, nodes=6),
}
LENGTH = 96
REPEATS = 3


def demo() -> int:
    """Streams three continuations drafted as trees, then decodes them plain, as chains and as trees, and compares.

    Returns:
      The exit status: 0 if the texts are equal.
    """
    folder = bundled_target()
    model = load_target(folder, dtype="float32")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None  # the bundled folder has one
    drafters = {method: get_drafter(bundled_drafter(), draft, model) for method, draft in DRAFTS.items()}
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    print(f"{folder.name}: {model.config.num_hidden_layers} layers, float32; compiling takes a moment\n", flush=True)

    def start(ids: list[int], method: Method) -> Stream:
        options = {"max_new_tokens": LENGTH, "stop_token_ids": model.config.eos_token_ids}
        return stream(model, [ids], method=method, drafter=drafters[method], draft=DRAFTS[method], **options)

    for ids in prompts:
        show_stream(start(ids, "tree"), ids, tokenizer)
        print("-" * 60)

    print(f"{'prompt':>6}  {'method':6} {'nodes':>5} {'tokens':>6} {'tokens/s':>8} {'speed-up':>8} ", end="")
    print(f"{'accepted length':>15}  text", flush=True)
    status = 0
    for number, ids in enumerate(prompts, 1):
        runs = [{method: finish(start(ids, method)) for method in DRAFTS} for _ in range(REPEATS)]
        results = {method: fastest([run[method] for run in runs]) for method in DRAFTS}
        plain = results["ar"]
        for method, result in results.items():
            equal = result.tokens == plain.tokens
            status = status if equal else 1
            print(
                f"{number:>6}  {method:6} {DRAFTS[method].nodes:>5} {len(result.tokens[0]):>6} "
                f"{len(result.tokens[0]) / result.log.seconds:>8.1f} {plain.log.seconds / result.log.seconds:>8.2f} "
                f"{result.accepted_length[0]:>15.2f}  {'equal' if equal else 'DIFFERENT'}",
                flush=True,
            )
    print(f"\nar is plain decoding; times are the fastest of {REPEATS} runs, without compilation")
    return status


def finish(pieces: Stream) -> GenerationResult:
    """Runs a stream to its end without showing it."""
    for _ in pieces:
        pass
    return pieces.result


def fastest(results: list[GenerationResult]) -> GenerationResult:
    """The result that took the least time."""
    return min(results, key=lambda result: result.log.seconds)
