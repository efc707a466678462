"""The host without a checkout: flags, interceptions, and the message about what is missing."""

import argparse
import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mindspeed_core.cli.features import program
from mindspeed_core.discovery.host import ERROR, NOTE, OK
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.errors import ArgumentError
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.registry import Registry
from mindspeed_megatron import brought_training
from mindspeed_megatron.hosts.megatron_lm import checkout
from mindspeed_megatron.hosts.megatron_lm.flag_ownership import still_values
from mindspeed_megatron.hosts.megatron_lm.flags import _of_record, flags_of
from mindspeed_megatron.hosts.megatron_lm.needed_patches import needed, patches_for
from mindspeed_megatron.hosts.megatron_lm.patch_table import ARGUMENTS, ENTRIES, PATCHES, STARTUPS
from mindspeed_megatron.hosts.megatron_lm.session import refuse_at_once
from mindspeed_megatron.hosts.megatron_lm.without_te import apply_defaults

ROOT = Path(__file__).resolve().parents[4]
TRAINING = Path("megatron") / "training"
FROM_PLUGINS = ("flash-attn", "fused-rmsnorm", "fused-swiglu", "profile")


def test_flags_are_known_without_torch():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from mindspeed_megatron.hosts.megatron_lm.flags import host_flags; "
            "print(len(host_flags()), {'torch', 'megatron', 'numpy', 'pluggy'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    count, loaded = done.stdout.split(maxsplit=1)
    assert int(count) > 600
    assert loaded.strip() == "set()"


def test_the_table_says_the_same_as_the_parser_it_was_written_from():
    spec = importlib.util.spec_from_file_location("table_tool", ROOT / "tools" / "megatron_lm_flags.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kind", choices=["a", "b"], default="a")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0])
    parser.add_argument("--no-fusion", "--disable-fusion", action="store_false", dest="fusion")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--offload", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--pattern", type=lambda text: text.split(","))
    written = json.loads(json.dumps(list(tool.facts(parser))))
    from_table = [flag for record in written for flag in _of_record(record)]
    assert [(f.options, f.meaning()) for f in from_table] == [
        (f.options, f.meaning()) for f in flags_of(parser)
    ]


def test_a_plan_for_a_script_of_megatron_lm():
    flags = ("--use-flash-attn", "--no-persist-layer-norm", "--iterations-to-skip", "1", "2")
    done = CliRunner().invoke(
        program, ["plan", "--host", "megatron-lm", "--platform", "cpu", "--json", "--", *flags]
    )
    planned = json.loads(done.output)
    assert planned["host"] == "megatron-lm"
    assert [feature["name"] for feature in planned["features"]] == ["flash-attn"]
    assert planned["presets"]["create_attention_mask_in_dataloader"]["value"] is False


def test_patches_are_listed_for_the_flags_of_a_run():
    done = CliRunner().invoke(
        program, ["patches", "--host", "megatron-lm", "--platform", "cpu", "--json", "--", "--profile"]
    )
    targets = {patch["target"] for patch in json.loads(done.output)}
    assert "megatron.training.training:pretrain" in targets
    assert "megatron.training.training:train_step" in targets
    assert "megatron.training.training:training_log" not in targets


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_at_most_ten_functions_of_megatron_lm_are_intercepted_for_every_plugin(platform):
    registry = Registry.discover()
    stages = {stage for name in FROM_PLUGINS for stage in registry.features[name].cls.hooks()}
    targets = [patch.target for patch in patches_for(stages, {platform})]
    assert len([target for target in targets if not target.startswith("torch.")]) <= 10


def test_a_function_is_intercepted_once_however_many_rows_ask_for_it():
    rows = needed(("build_scheduler", "optimizer_step"), {"cuda"}, None, any_feature=True, without_te=True)
    targets = [row.target for row in rows]
    assert len(targets) == len(set(targets))


def test_a_provider_without_a_configuration_has_the_function_that_makes_it_intercepted():
    options = {"any_feature": True, "without_te": False}
    stages = ("build_transformer_config",)
    target = "megatron.training.arguments:core_transformer_config_from_args"
    assert target in {row.target for row in needed(stages, {"cuda"}, None, handed=(), **options)}
    assert target not in {row.target for row in needed(stages, {"cuda"}, None, handed=("config",), **options)}


def test_nothing_of_the_loop_is_intercepted_without_features():
    rows = needed((), {"cuda"}, None, any_feature=False, without_te=False)
    assert [row.target for row in rows] == ["megatron.core.parallel_state:initialize_model_parallel"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"save": "there"}, {"generate_state_dict"}),
        ({"load": "there"}, {"load_checkpoint", "_load_base_checkpoint"}),
        ({"pretrained_checkpoint": "there"}, {"load_checkpoint", "_load_base_checkpoint"}),
    ],
)
def test_models_of_checkpoints_are_described_and_compared_without_features(given, names):
    args, options = argparse.Namespace(**given), {"any_feature": False, "without_te": False}
    targets = [row.target for row in needed((), {"cuda"}, args, **options)]
    assert {target.rpartition(":")[2] for target in targets if "checkpointing" in target} == names


def test_a_platform_like_another_needs_the_same_patches():
    def targets(kinds):
        rows = needed((), kinds, None, any_feature=False, without_te=False)
        return [row.target for row in rows]

    assert targets({"acme", "cpu"}) == targets({"cpu"})
    assert len(targets({"cpu"})) > len(targets({"cuda"})) < len(targets({"npu"}))
    assert targets({"acme"}) == targets({"npu"})
    assert targets({"acme", "cuda"}) == targets({"cuda"})


def test_models_with_experts_need_what_corrects_them():
    def targets(handed=("config",), **values):
        args, options = argparse.Namespace(**values), {"any_feature": False, "without_te": False}
        rows = needed((), {"cuda"}, args, handed=handed, **options)
        return {row.target for row in rows}

    made = "megatron.training.arguments:core_transformer_config_from_args"
    built = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"
    counted = "megatron.core.pipeline_parallel.schedules:get_forward_backward_func"
    experts = targets(num_experts=4)
    assert built in experts
    assert counted not in experts
    assert counted not in targets(calculate_per_token_loss=True)
    # Built models are corrected, not their configuration, whether or not the script's provider is handed it.
    for handed in (("config",), ()):
        assert {built, counted} <= targets(handed, num_experts=4, calculate_per_token_loss=True)
        assert made not in targets(handed, num_experts=4, calculate_per_token_loss=True)


def test_the_table_speaks_of_stages_that_exist():
    known = set(core_stages())
    spoken_of = {stage for row in (*ENTRIES, *STARTUPS, *ARGUMENTS, *PATCHES) for stage in row.stages}
    assert spoken_of == known - {"prepare_process"}


def test_a_default_that_was_given_is_left_alone():
    args = argparse.Namespace(distributed_backend="mpi", transformer_impl="local")
    changed = apply_defaults(args, {"distributed_backend": "flag --distributed-backend"}, CpuPlatform)
    assert args.distributed_backend == "mpi"
    assert changed == []


@pytest.fixture
def searched(monkeypatch):
    """The module path as the doctor sees it, without what newer megatron-cores bring."""
    places = [place for place in sys.path if not (Path(place) / TRAINING).exists()]
    monkeypatch.setattr(checkout, "sys", SimpleNamespace(path=places))
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    return places


def test_without_a_checkout_the_import_fails_with_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(ImportError, match="no Megatron-LM checkout is importable"):
        checkout.require()


def test_a_missing_package_of_the_checkout_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import six_of_a_kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(checkout.PACKAGES, "six_of_a_kind", "six-kinds")
    with pytest.raises(ImportError, match="pip install six-kinds"):
        checkout.require()


@pytest.fixture
def forgotten():
    yield
    sys.modules.pop("megatron.training", None)
    vars(sys.modules["megatron"]).pop("training", None)


def test_a_checkout_that_is_too_old_is_named(tmp_path, monkeypatch, forgotten):
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(checkout, "installed_version", lambda name: "0.14.0")
    with pytest.raises(ImportError, match=r"brings megatron-core 0\.14\.0"):
        checkout.require()


def test_scripts_that_read_arguments_first_are_known_by_what_pretrain_takes():
    assert checkout.takes_settings(lambda cfg_container, datasets: None)
    assert not checkout.takes_settings(lambda datasets, model_provider: None)


def test_what_a_feature_claims_is_still_in_settings_made_before():
    claiming = SimpleNamespace(claims=lambda option: option == "--record-memory-history")
    assert still_values(claiming) == {"record_memory_history": False}


def test_a_restart_that_would_read_no_arguments_again_is_refused():
    restarting = Namespace(inprocess_restart=True)
    refuse_at_once(restarting, ())
    with pytest.raises(ArgumentError, match="no feature would be active after a fault"):
        refuse_at_once(restarting, (), again=True)


def test_the_doctor_sees_the_checkout_and_what_it_imports(tmp_path, monkeypatch, searched):
    assert checkout.findings()[0].severity == ERROR
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "arguments.py").touch()
    monkeypatch.setenv(checkout.VARIABLE, str(tmp_path))
    assert checkout.findings()[0].severity == NOTE
    searched.insert(0, str(tmp_path))
    monkeypatch.delenv(checkout.VARIABLE)
    assert checkout.findings()[0].severity == OK
    monkeypatch.setattr(checkout, "PACKAGES", {"no_such_package": "no-such-package", "os": "os"})
    assert checkout.findings()[1].remedy == "pip install no-such-package"


def test_what_megatron_core_brings_is_no_checkout(tmp_path, monkeypatch, searched):
    site, tree = tmp_path / "site", tmp_path / "tree"
    for place in (site, tree):
        (place / TRAINING).mkdir(parents=True)
        (place / TRAINING / "arguments.py").touch()
    brought = SimpleNamespace(locate_file=lambda name: site / name)
    monkeypatch.setattr(brought_training, "distribution", lambda name: brought)
    searched.append(str(site))
    assert "brings megatron.training" in checkout.findings()[0].observed
    monkeypatch.setenv(checkout.VARIABLE, str(tree))
    assert checkout.findings()[0].severity == NOTE
    monkeypatch.delenv(checkout.VARIABLE)
    searched.insert(0, str(tree))
    assert checkout.findings()[0].observed == f"{tree} is on the module path"


@pytest.mark.parametrize("name", ["save", "load", "pretrained_checkpoint"])
def test_a_url_that_megatron_lm_takes_for_a_folder_is_refused(name):
    refuse_at_once(Namespace(**{name: "msc://profile/run"}), ())
    refuse_at_once(Namespace(**{name: "/data/run"}), ())
    with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')} 's3://'") as caught:
        refuse_at_once(Namespace(**{name: "s3://key:geheim@bucket/run"}), ())
    assert "geheim" not in str(caught.value)
