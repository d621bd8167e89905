"""Tokenizes a corpus into an indexed dataset (.bin, .idx) in Megatron's format.

Reads JSONL (also .gz, .zst), text files, Parquet, and folders that Hugging Face's datasets saved. A run that
was killed continues when the same command is given again.

Example:
  python tools/preprocess_data.py --input corpus/*.jsonl.gz --output-prefix data/train \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tok.model --append-eod --workers 8

writes data/train_text_document.bin, .idx and .meta.json.
"""

from __future__ import annotations

import argparse
import sys

from megnorm.data.command import run_tool
from megnorm.data.fast_encoders import BACKENDS
from megnorm.data.inputs import FORMATS
from megnorm.data.lengths import describe_quantiles
from megnorm.data.preprocess import PreprocessOptions, PreprocessReport, preprocess
from megnorm.data.tokenizers import TOKENIZER_TYPES


def parse() -> PreprocessOptions:
    """The command line as options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_input_options(parser)
    add_tokenizer_options(parser)
    add_run_options(parser)
    return to_options(parser.parse_args())


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """What to read and where to write."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders or glob patterns; read in the order given",
    )
    add(
        "--input-format",
        choices=FORMATS,
        default="auto",
        help="auto: by the suffix, or JSONL; text: each file is a document (default: auto)",
    )
    add(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="one dataset for each (default: text)"
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_<key>_document.bin, .idx and .meta.json",
    )


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """How to tokenize."""
    add = parser.add_argument
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="kind of tokenizer")
    add(
        "--tokenizer-model",
        metavar="FILE",
        help="SentencePiece .model, tokenizer.json or its folder, or <encoding>.tiktoken",
    )
    add(
        "--tokenizer-backend",
        choices=BACKENDS,
        default="auto",
        help="what runs the tokenizer; a faster one must give the same ids on a sample first. "
        "auto: gigatoken where it does, else native (default: auto)",
    )
    add("--append-eod", action="store_true", help="end each document that isn't empty with the end token")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How many processes and machines, and what a bad record does."""
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="N", help="processes; the output doesn't depend on it")
    add(
        "--on-error",
        choices=("abort", "skip"),
        default="abort",
        help="a bad record ends the command, or goes to PREFIX.rejected.jsonl (default: abort)",
    )
    add("--rank", type=int, default=0, metavar="R", help="this machine of --world-size (default: 0)")
    add(
        "--world-size",
        type=int,
        default=1,
        metavar="W",
        help="machines that share the inputs; each writes PREFIX_<R>_of_<W>_<key>_document, which "
        "merge_datasets.py joins in order (default: 1)",
    )


def to_options(args: argparse.Namespace) -> PreprocessOptions:
    """The parsed arguments by the names of the library."""
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        on_error=args.on_error,
        input_format=args.input_format,
        backend=args.tokenizer_backend,
        rank=args.rank,
        world_size=args.world_size,
    )


def show(report: PreprocessReport) -> None:
    """Print what was written."""
    for k, prefix in enumerate(report.prefixes):
        tokens, size = report.tokens[k], report.text_bytes[k]
        ends = f" ({report.eod_tokens[k]:,} of them ends of documents)" if report.eod_tokens[k] else ""
        print(f"{prefix}: {report.documents:,} documents, {tokens:,} tokens{ends}")
        print(
            f"  {size / 1e6:.1f} MB of text, {size / max(tokens, 1):.2f} bytes a token, "
            f"{report.seconds:.1f} s, {size / report.seconds / 1e6:.1f} MB/s, by {report.backend}"
        )
        if report.documents:
            print(f"  tokens a document: {describe_quantiles(report.lengths[k])}")
    if report.skipped:
        print(f"skipped {report.skipped:,} bad records, kept in {report.rejected}")


def main() -> int:
    show(preprocess(parse(), lambda message: print(message, file=sys.stderr)))
    return 0


if __name__ == "__main__":
    run_tool(main)
