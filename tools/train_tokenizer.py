"""Trains a BPE tokenizer on a corpus (as preprocess_data.py reads it) and checks that texts come back."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megnorm.data.command import run_tool
from megnorm.data.tokenizer_training import train_hf_bpe, train_sentencepiece

TRAINERS = {"SentencePieceTokenizer": train_sentencepiece, "HFTokenizer": train_hf_bpe}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="files, folders or glob patterns"
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="where the text is (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, metavar="V", help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="writes PREFIX.model or PREFIX.json"
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=TRAINERS,
        default="SentencePieceTokenizer",
        help="SentencePiece BPE, or byte-level BPE of Hugging Face's tokenizers (default: %(default)s)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=64.0,
        metavar="MB",
        help="learn from about so many million characters of a larger corpus (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of that choice (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads (default: %(default)s)")
    args = parser.parse_args()

    def say(message: str) -> None:
        print(message, flush=True)

    report = TRAINERS[args.tokenizer_type](
        args.input, args.output, args.vocab_size, args.json_key, args.megabytes, args.seed, args.workers, say
    )
    say(
        f"{report.model}: {report.vocab_size} tokens, learnt from {report.characters_used / 1e6:.1f} million "
        f"characters in {report.seconds:.1f} s; {report.bytes_per_token:.2f} bytes a token; "
        f"{report.checked} texts encoded and decoded exactly"
    )
    if report.with_space_mark:
        say(f"note: {report.with_space_mark} of them hold U+2581, which SentencePiece gives back as a space")
    return 0


if __name__ == "__main__":
    run_tool(main)
