"""Trains the bundled model on one GPU: `python -m launch.bundled_model.train --work W --out O --minutes 9`.

Continues from the checkpoint in `--work` and stops by itself after `--minutes` of wall-clock time, everything counted,
with a new checkpoint there and the model exported in `--out/model`.  The schedule is in minutes of training; what
compilation and evaluation take is not counted.
"""

import argparse
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main():
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=ROOT / ".corpus", help="what prepare_corpus.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="checkpoint, tokens and compilation cache")
    parser.add_argument("--out", type=Path, required=True, help="metrics.jsonl and the exported model")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock time of this call")
    parser.add_argument(
        "--phases", default="2048:5,8192:5,32768:9,65536:3", help="LENGTH:MINUTES of training, in order"
    )
    parser.add_argument("--decay-from", type=float, default=10.0, help="minute from which the learning rate falls")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--attention", choices=("cudnn", "blocked"), default="cudnn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-from", type=Path, help="exported model to begin with, if there is no checkpoint")
    parser.add_argument("--start-minutes", type=float, default=0.0, help="minutes of training in --start-from")
    parser.add_argument("--smoke", action="store_true", help="compile and measure only")
    args = parser.parse_args()
    if args.start_from is None and args.start_minutes:
        parser.error("expected --start-from with --start-minutes")
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)

    # Here and not above: the processes that make batches import this file, and need no jax.
    from launch.bundled_model.trainer import Trainer

    trainer = Trainer(args, begun)
    try:
        if args.smoke:
            trainer.smoke()
        else:
            trainer.run()
    finally:
        trainer.loader.close()


if __name__ == "__main__":
    main()
