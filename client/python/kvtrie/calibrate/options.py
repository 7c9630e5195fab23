"""The command line of python -m kvtrie.calibrate."""

import argparse
import os
import pathlib

from kvtrie.calibrate import steps
from kvtrie.calibrate.model_spec import DTYPES
from kvtrie.errors import KvtrieError


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Errors: ends the process with code 2, as argparse does; KvtrieError for what needs a look at files."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtrie.calibrate",
        description="Makes a codec profile of a model: fits it to KV of texts, measures what its levels cost the model "
                    "on texts that were held out, and moves base steps until every level keeps its promise.")
    parser.add_argument("model_dir", type=pathlib.Path, metavar="MODEL_DIR",
                        help="folder of a Hugging Face causal language model that turns K by RoPE (Llama, SmolLM2, "
                             "Qwen2, Mistral and alike)")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True, metavar="FILE",
                        help="UTF-8 texts, of the kind that the model will see; each file extension is a group, of "
                             "which some texts are held out")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE.kvp", help="the profile")
    parser.add_argument("--held-out-group", action="append", default=[], metavar="NAME=FILE,...",
                        help="texts that are only judged, another language say; may be repeated")
    parser.add_argument("--kvtrie", metavar="PROGRAM", help="the command kvtrie (default: from PATH)")
    parser.add_argument("--put", metavar="TARGET", help="store the profile with this server")
    parser.add_argument("--work", type=pathlib.Path, metavar="FOLDER",
                        help="what is computed; a run that was ended goes on there (default: OUT.work)")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="draw bits against KL there")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all that was measured there")

    model = parser.add_argument_group("the model")
    model.add_argument("--name", help="as it will be registered (default: the folder's name)")
    model.add_argument("--weights-revision", help="the same (default: SHA-256 of the files of weights)")
    model.add_argument("--spec", type=pathlib.Path, metavar="FILE.json",
                       help="JSON of the ModelSpec that it will be registered with, instead of these")
    model.add_argument("--kv-dtype", choices=sorted(DTYPES), help="as which KV is stored (default: the weights')")
    model.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="to compute in (float32)")
    model.add_argument("--device", default="cpu", help="to compute on, as torch names it (cpu)")
    model.add_argument("--threads", type=_count, help="of torch on the CPU (default: its own choice)")

    texts = parser.add_argument_group("texts")
    texts.add_argument("--sample-tokens", type=_count, default=1024, help="of a sample (1024)")
    texts.add_argument("--continuation-tokens", type=_count, default=256,
                       help="of these, at the end: judged, not stored (256)")
    texts.add_argument("--samples-per-text", type=_count, default=4, help="at most (4)")
    texts.add_argument("--fitted-samples-max", type=_count, default=48, help="in all (48); more give fewer bits")
    texts.add_argument("--held-out-share", type=_share, default=0.2, help="of a group's texts (0.2)")
    texts.add_argument("--held-out-max", type=_count, default=4, help="texts of a group (4)")
    texts.add_argument("--first-token", metavar="ID",
                       help="that every session begins with; none: there is none (default: the tokenizer's BOS)")

    fit = parser.add_argument_group("the fit")
    fit.add_argument("--no-gradients", action="store_true",
                     help="take query statistics and output weights instead: less time and memory, more bits")
    fit.add_argument("--draws", type=_count, default=2, help="of labels per sample, for gradients (2)")
    fit.add_argument("--material", type=pathlib.Path, metavar="FILE",
                     help="a ready file of `kvtrie profile material`, instead of gradients")
    for level, step in steps.FIRST_STEPS.items():
        fit.add_argument(f"--{level}", type=_step, default=step, metavar="STEP",
                         help=f"base step to begin with ({step:g}); 0: no such level")
    fit.add_argument("--margin", type=_share, default=0.1, help="of each level's bound, kept free (0.1)")
    fit.add_argument("--fits-max", type=_count, default=4, help="until all levels keep their promise (4)")
    fit.add_argument("--vocabulary-max", type=_count_or_none, default=32768, metavar="N",
                     help="tokens whose layer 0 the profile has, whether texts have them or not: the N of the lowest "
                          "ids, which come most often (32768); 400 bytes to 2 kB each")
    fit.add_argument("--repeated-samples", type=_count_or_none, default=12, metavar="N",
                     help="fitted ones whose text is computed again behind another prefix, so that the profile can "
                          "code a text against the same text elsewhere (12); 0: it cannot")
    fit.add_argument("--difference-steps", type=_factor, default=4.0, metavar="FACTOR",
                     help="steps of what a text differs by from the same text elsewhere, in those of its level (4); "
                          "they are halved while a level breaks its promise there")
    fit.add_argument("--fit-flag", action="append", default=[], metavar="NAME=VALUE",
                     help="for `kvtrie profile fit`, e.g. table=4096; may be repeated")
    fit.add_argument("--block-tokens", type=_count, default=16, help="of the blocks that are judged (16)")

    options = parser.parse_args(arguments)
    if options.continuation_tokens >= options.sample_tokens:
        parser.error("--continuation-tokens: must be less than --sample-tokens")
    if (options.sample_tokens - options.continuation_tokens) % options.block_tokens != 0:
        parser.error("--block-tokens: must divide --sample-tokens less --continuation-tokens")
    if options.material and options.no_gradients:
        parser.error("--material: has what --no-gradients would make; give one of them")
    if not any(getattr(options, level.replace("-", "_")) for level in steps.FIRST_STEPS):
        parser.error("no level is left: give one of them a step above 0")
    options.work = options.work or options.out.with_name(f"{options.out.name}.work")
    for flag, path in (("--out", options.out), ("--png", options.png), ("--json", options.json)):
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise KvtrieError(f"{flag} {path}: its folder does not exist, or cannot be written to")
    return options


def first_token(text: str | None, of_tokenizer: int | None) -> int | None:
    """Errors: KvtrieError."""
    if text is None:
        return of_tokenizer
    if text == "none":
        return None
    if not text.isdecimal():
        raise KvtrieError(f"--first-token {text}: must be a token id, or none")
    return int(text)


def fit_flags(arguments: list[str]) -> dict[str, object]:
    """Errors: KvtrieError."""
    flags: dict[str, object] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name:
            raise KvtrieError(f"--fit-flag {argument}: must be NAME=VALUE, or NAME")
        flags[name] = value if equals else True
    return flags


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _count_or_none(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be from 0 on and below 1")
    return value


def _factor(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1000")
    return value


def _step(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
