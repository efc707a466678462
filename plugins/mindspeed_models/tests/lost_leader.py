"""A program of two ranks whose first one dies while the other follows it."""

import os
import sys


def main(folder: str, moment: str) -> None:
    """Load a model on two ranks; the first one dies while nothing is asked, or in the middle of a batch."""
    from mindspeed_models import load
    from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings

    with load(folder, tp=2, platform="cpu") as model:
        if not model.leader:
            print("follows", flush=True)
            model.follow()
            print("returned", flush=True)
            return
        if moment == "idle":
            os._exit(9)
        settings = GenerationSettings(max_new_tokens=40, eos_token_ids=())
        model.generate_requests([GenerationRequest([5, 6, 7], settings, 0)], lambda number, new: os._exit(9))


if __name__ == "__main__":
    main(*sys.argv[1:])
