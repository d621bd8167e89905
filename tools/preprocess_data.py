"""Tokenizes JSONL files into an indexed dataset (.bin, .idx) in Megatron's format.

Example:
  python tools/preprocess_data.py --input corpus/*.jsonl.gz --output-prefix data/train \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tok.model --append-eod --workers 8

writes data/train_text_document.bin, .idx and .meta.json.
"""

from __future__ import annotations

import argparse

from megnorm.data.command import run_tool
from megnorm.data.preprocess import PreprocessOptions, PreprocessReport, preprocess
from megnorm.data.tokenizers import TOKENIZER_TYPES


def parse() -> PreprocessOptions:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL files or glob patterns, also .gz and .zst; read in the order given",
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
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="kind of tokenizer")
    add("--tokenizer-model", metavar="FILE", help="SentencePiece .model, or tokenizer.json or its folder")
    add("--append-eod", action="store_true", help="end each document that isn't empty with the end token")
    add("--workers", type=int, default=1, metavar="N", help="processes; the output doesn't depend on it")
    add(
        "--on-error",
        choices=("abort", "skip"),
        default="abort",
        help="a bad line ends the command, or goes to PREFIX.rejected.jsonl (default: abort)",
    )
    args = parser.parse_args()
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        on_error=args.on_error,
    )


def show(report: PreprocessReport) -> None:
    for k, prefix in enumerate(report.prefixes):
        tokens, size = report.tokens[k], report.text_bytes[k]
        ends = f" ({report.eod_tokens[k]:,} of them ends of documents)" if report.eod_tokens[k] else ""
        print(f"{prefix}: {report.documents:,} documents, {tokens:,} tokens{ends}")
        print(
            f"  {size / 1e6:.1f} MB of text, {size / max(tokens, 1):.2f} bytes a token, "
            f"{report.seconds:.1f} s, {size / report.seconds / 1e6:.1f} MB/s"
        )
    if report.skipped:
        print(f"skipped {report.skipped:,} bad lines, kept in {report.rejected}")


def main() -> int:
    show(preprocess(parse()))
    return 0


if __name__ == "__main__":
    run_tool(main)
