"""The proof of the schedule, as a feature that is active with it: ``mindspeed-features verify`` finds it."""

from typing import Any

from mindspeed_core.feature import Feature, Requirement, Resume, Scenario

_PP2 = ("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1", "--global-batch-size", "8")
_EAGER = ("--pipeline-schedule", "eager-1f1b")


class EagerSchedule(Feature):
    """1F1B that runs ahead."""

    name = "acme-eager-1f1b"
    family = "pipeline-parallelism"
    summary = "Overlap messages of 1F1B with computation"
    requires = (Requirement(feature="pp-engine", reason="it runs the schedule"),)
    docs = "acme_pp:docs/eager.md"
    affects_checkpoint = False
    verify = (
        Scenario("1f1b", flags=(*_PP2, *_EAGER), baseline=_PP2, world_size=2, tolerance=0.0),
        Scenario(
            "resume",
            flags=(*_PP2, *_EAGER),
            world_size=2,
            resume=Resume(flags=_PP2, world_size=2, with_feature=False),
        ),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the schedule is asked for."""
        return getattr(args, "pipeline_schedule", None) == "eager-1f1b"


DECLARATIONS = (EagerSchedule,)
