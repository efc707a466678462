"""Each function of a library session alone: what goes in comes out, with what features changed."""

import copy
import dataclasses
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from library_features import OwnConfig, build, logits, parallel, registry, small
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from mindspeed_core import activate
from mindspeed_core.errors import CheckpointError, SessionError, UserError
from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.run import Batch, StepResult
from mindspeed_kernels.modules.core_attention import FusedCoreAttention
from mindspeed_megatron.feature_state import feature_parts
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.hosts.library import HOST
from mindspeed_testing import run_world

KERNELS = {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_flash_attn": True}


@pytest.fixture(scope="module")
def parallel_state_of_one():
    """megatron-core's groups in this process: some of its functions ask for them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    destroy_megatron_state()
    dist.destroy_process_group()


@pytest.fixture
def opened(parallel_state_of_one):
    sessions = []

    def open_with(flags, **options):
        options.setdefault("registry", registry())
        sessions.append(activate(flags, platform="cpu", **options))
        return sessions[-1]

    yield open_with
    for session in sessions:
        session.close(force=True)


class Adds:
    """An extra plugin that takes part in the stages of a step."""

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        return batch.with_(tokens=batch.tokens + 1, extra={**batch.extra, "seen": True})

    @hookimpl(wrapper=True)
    def compute_loss(self, batch):
        loss = yield
        return dataclasses.replace(
            loss, total=loss.total * 3, report={**loss.report, "extra": len(batch.extra)}
        )

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        update = yield
        run.metrics.add("updates", float(update.successful), "sum")
        return update

    @hookimpl(wrapper=True)
    def build_optimizer_config(self):
        config = yield
        config.lr = 0.5
        return config

    @hookimpl(wrapper=True)
    def build_ddp_config(self):
        return dataclasses.replace((yield), bucket_size=7)

    @hookimpl(wrapper=True)
    def get_forward_backward(self):
        yield
        return lambda **options: ("theirs", options)


def test_a_configuration_keeps_its_class_its_fields_and_its_other_attributes(opened):
    session, config = opened({"deeper": True}, configs=[small()]), small()
    config.note = "mine"
    before = dict(vars(config))
    made = session.config(config)
    assert type(made) is OwnConfig
    assert (made.num_layers, made.rope_scaling_kind, made.note) == (3, "linear", "mine")
    assert vars(config) == before


def test_a_configuration_passes_once(opened):
    session = opened({"deeper": True}, configs=[small()])
    made = session.config(small())
    assert session.config(made) is made
    assert session.config(copy.deepcopy(made)).num_layers == 3


def test_another_model_s_configuration_is_its_own(opened):
    session = opened({"deeper": True}, configs=[small()])
    assert session.config(small(hidden_size=64)).hidden_size == 64


def test_a_configuration_that_a_feature_cannot_work_with_is_refused(opened):
    session = opened({"no_bias": True}, configs=[small()])
    with pytest.raises(PlanError, match="LayerNorm"):
        session.layer_spec(small(normalization="LayerNorm"))


def test_a_configuration_that_lacks_what_features_change_is_refused(opened):
    session = opened({"use_fused_swiglu": True}, configs=[small()], registry=None)
    with pytest.raises(SessionError, match=r"lacks what fused-swiglu changes; .* session\.config\(config\)"):
        session.layer_spec(small())


def test_a_configuration_of_another_session_is_refused(opened):
    config = small()
    first = opened({"use_fused_swiglu": True}, configs=[config], registry=None)
    made = first.config(config)
    first.close()
    with pytest.raises(SessionError, match="was made by a session with another plan"):
        opened({}, configs=[config]).layer_spec(made)


def test_coefficients_of_losses_of_experts_stay_what_they_are(opened):
    shared = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    experts = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25}
    given = small(**shared, **experts, calculate_per_token_loss=True)
    session = opened({})
    made = session.config(given)
    # Routers of the built model are corrected instead.
    assert (made.moe_aux_loss_coeff, made.moe_z_loss_coeff) == (0.5, 0.25)
    session.layer_spec(given)


@pytest.mark.parametrize("kind", ["layer", "chunk", "block", "none"])
def test_any_form_of_specification_becomes_that_of_a_chunk(opened, kind):
    config = small()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    chunk = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    forms = {"layer": layer, "chunk": chunk, "block": ModuleSpec(TransformerBlock, submodules=chunk)}
    session = opened({"use_flash_attn": True}, configs=[config], registry=None)
    spec = session.layer_spec(session.config(config), forms.get(kind))
    assert isinstance(spec, TransformerBlockSubmodules)
    assert len(spec.layer_specs) == 2
    for one in spec.layer_specs:
        core = one.submodules.self_attention.submodules.core_attention
        assert core.module is FusedCoreAttention
    assert session.report()["modules"] == {"flash-attn": 2}


def test_what_is_no_specification_is_refused(opened):
    with pytest.raises(SessionError, match="base is a str"):
        opened({}).layer_spec(small(), "local")


def test_options_of_optimizer_and_data_parallelism_are_changed_in_copies(opened):
    session = opened({}, extra_plugins=[Adds()])
    optimizer, ddp = OptimizerConfig(lr=0.1), DistributedDataParallelConfig()
    assert session.optimizer_config(optimizer).lr == 0.5
    assert session.ddp_config(ddp).bucket_size == 7
    assert (optimizer.lr, ddp.bucket_size) == (0.1, None)


def test_a_batch_comes_back_in_its_form(opened):
    session, tokens = opened({}, extra_plugins=[Adds()]), torch.zeros(1, 2, dtype=torch.long)
    made = session.batch({"tokens": tokens, "labels": None, "reward": 1.5})
    assert made.keys() == {"tokens", "labels", "reward", "seen"}
    assert made["tokens"].tolist() == [[1, 1]]
    assert isinstance(session.batch(Batch(tokens=tokens)), Batch)


def test_a_loss_returns_as_many_values_as_the_caller_s(opened):
    session, output = opened({}, extra_plugins=[Adds()]), torch.tensor([1.0, 2.0])
    mean = session.loss(lambda out: (out.mean(), {"loss": out.mean()}), {"reward": 1.0})
    total = session.loss(lambda out: (out.sum(), torch.tensor(2.0), {}))
    assert [float(mean(output)[0]), mean(output)[1]["extra"]] == [4.5, 1]
    assert [float(value) for value in total(output)[:2]] == [9.0, 2.0]
    assert total(output)[1].dtype == torch.int, "megatron-core adds it to whole numbers"
    assert session.loss(lambda out, non_loss_data: out)(output, non_loss_data=True) is output


def test_the_update_of_any_optimizer_passes_through_the_session(opened):
    session = opened({}, extra_plugins=[Adds()])
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = session.wrap_optimizer(torch.optim.SGD([parameter], lr=0.5))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    parameter.grad = torch.ones(2)
    assert optimizer.step() is None
    scheduler.step()
    assert parameter.tolist() == [0.5, 0.5]
    assert session.log_step({"loss": 1.0}) == {"loss": 1.0, "updates": 1.0}


def test_a_closed_session_takes_no_part_in_updates(opened):
    session = opened({}, extra_plugins=[Adds()])
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = session.wrap_optimizer(torch.optim.SGD([parameter], lr=0.5))
    parameter.grad = torch.ones(2)
    session.close()
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]
    assert session.run.metrics.names() == []


def test_an_update_returns_what_megatron_core_s_does(opened):
    class Optimizer:
        def step(self):
            return True, 2.5, None

    session = opened({}, extra_plugins=[Adds()])
    assert session.wrap_optimizer(Optimizer()).step() == (True, 2.5, None)


def test_the_schedule_is_that_of_features(opened):
    name, options = opened({}, extra_plugins=[Adds()]).forward_backward()(num_microbatches=2)
    assert (name, options["num_microbatches"]) == ("theirs", 2)


class Scheduled:
    """A schedule of the test's own."""

    def __init__(self, function):
        self.function = function

    @hookimpl
    def get_forward_backward(self):
        return self.function


def test_the_forward_step_knows_its_micro_batch(opened):
    seen = []

    def forward(iterator, model, return_schedule_plan=False):
        seen.append((session.run.context.microbatch, return_schedule_plan))
        return torch.ones(()), None

    def two_forwards(**_):
        return [wrapped(None, None), wrapped(None, None, return_schedule_plan=True)]

    session = opened({}, extra_plugins=[Scheduled(two_forwards)])
    wrapped = session.forward_step(forward)
    schedule = session.forward_backward()
    for _ in range(2):
        schedule()
    assert seen == [(0, False), (1, True)] * 2
    assert session.run.context.microbatch == -1


def test_samples_are_counted_and_sizes_are_those_of_the_batch(opened):
    session = opened({"seq_length": 8}, extra_plugins=[Scheduled(lambda **_: None)])
    batch = Batch(tokens=torch.zeros(3, 5, dtype=torch.long))
    session.batch(batch)
    assert (session.run.args.micro_batch_size, session.run.args.seq_length) == (3, 5)
    schedule = session.forward_backward()
    sizes = {"num_microbatches": 4, "seq_length": 5, "micro_batch_size": 2}
    schedule(**sizes)
    assert session.run.consumed_train_samples == 3 + 4 * 2
    schedule(**sizes, forward_only=True)
    assert session.run.consumed_train_samples == 3 + 4 * 2


def test_a_training_step_may_say_what_it_did(opened):
    session = opened({})
    result = StepResult(losses={"loss": 1.0}, skipped=False, grad_norm=None, num_zeros=None)
    assert session.train_step(lambda: result)() is result
    assert session.train_step(lambda **options: options)(a=1) == {"a": 1}
    assert session.train_step(lambda: None)() is None
    assert session.run.iteration == 3


def saved_with_a_block():
    session = activate({"toy_exchange_mlp": True}, platform="cpu")
    with session.saving():
        inside = session.is_open
    session.close()
    return inside


def test_a_block_for_saving_passes_the_stages():
    assert run_world(saved_with_a_block, 1) == [True]


def model_without_its_specification():
    parallel()
    config = small()
    session = activate({"use_fused_rmsnorm": True}, platform="cpu", configs=[config])
    plain = activate_nothing(config)
    try:
        session.model(plain)
    except SessionError as error:
        return str(error), session.is_open
    finally:
        session.close()


def activate_nothing(config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(config, spec, 64, 16, position_embedding_type="rope")


def test_a_model_that_was_built_without_its_features_is_refused():
    ((message, still),) = run_world(model_without_its_specification, 1)
    assert "fused-rmsnorm: active, but matched no module" in message
    assert still


class Wider(Feature):
    """Asks for the groups of its schedule, and sends another shape between pipeline stages."""

    name, family, summary = "wider", "tests", "sends another shape"
    flags = (Flag("--wider"),)

    @hookimpl
    def get_forward_backward(self, pg):
        return lambda **options: (pg, sorted(options))

    @hookimpl(wrapper=True)
    def boundary_schema(self):
        schema = yield
        spec = schema.tensors[0]
        return dataclasses.replace(schema, tensors=(dataclasses.replace(spec, shape=(*spec.shape, 2)),))


def two_stages():
    """Process groups of a pipeline of two."""
    return SimpleNamespace(pp=SimpleNamespace(size=lambda: 2), dp=SimpleNamespace(size=lambda: 1))


def pipelined(**changes):
    return small(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **changes)


def test_a_schedule_gets_the_groups_and_the_shapes_that_features_change(opened):
    session = opened({"wider": True}, registry=Registry.of((HOST, CpuPlatform, Wider)))
    pg = session.build_groups(two_stages())
    schedule = session.forward_backward(pipelined())
    got, names = schedule(seq_length=8, micro_batch_size=1)
    assert got is pg
    assert names == ["adjust_tensor_shapes_fn", "micro_batch_size", "seq_length"]


def test_a_single_chunk_per_rank_is_not_interleaved(opened, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    session = opened({})
    for chunks, interleaved in ((1, False), (2, True)):
        monkeypatch.setattr(
            parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda size=chunks: size
        )
        chosen = session.call("get_forward_backward", args=None, config=None, pg=None, run=None)
        assert (chosen is schedules.forward_backward_pipelining_with_interleaving) == interleaved


def test_changed_tensors_are_refused_under_interleaving(opened):
    session = opened({"wider": True}, registry=Registry.of((HOST, CpuPlatform, Wider)))
    session.build_groups(two_stages())
    schedule = session.forward_backward(pipelined(num_layers=4, virtual_pipeline_model_parallel_size=2))
    with pytest.raises(UserError, match="megatron-core's interleaved schedule cannot"):
        schedule(seq_length=8, micro_batch_size=1)


class Averaged:
    """State in checkpoints: a number, and a tensor that is described as sharded."""

    def __init__(self, value=0.0):
        self.value, self.restored = value, None

    @hookimpl
    def checkpoint_state(self):
        part = ShardedTensor.from_rank_offsets("tensor", torch.full((2,), self.value))
        return {"averaged": {"steps": int(self.value), "tensor": part}}

    @hookimpl
    def restore_checkpoint_state(self, state):
        self.restored = state["averaged"]["steps"], state["averaged"]["tensor"].tolist()


@pytest.mark.parametrize("hosts", [("library", "standalone"), ("standalone", "library")])
def test_state_of_features_changes_hands_with_the_standalone_host(parallel_state_of_one, tmp_path, hosts):
    (tmp_path / "saved").mkdir()
    for host, own in zip(hosts, (Averaged(3.0), Averaged())):
        with activate({}, host=host, platform="cpu", extra_plugins=[own]) as session:
            state = {"features": feature_parts(Namespace(session=session))}
            if host == "library":
                state = {"features": session.state_dict()}
            if own.value:
                dist_checkpointing.save(state, str(tmp_path / "saved"))
                continue
            loaded = dist_checkpointing.load(state, str(tmp_path / "saved"))["features"]
            session.collect("restore_checkpoint_state", run=None, state=loaded)
            assert own.restored == (3, [3.0, 3.0])
    assert state["features"]["averaged"]["tensor"].key == "features.averaged.tensor"


def test_two_features_under_one_name_of_state_are_refused(opened):
    session = opened({}, extra_plugins=[Averaged(1.0), Averaged(2.0)])
    with pytest.raises(CheckpointError, match="checkpoint state under the name 'averaged'"):
        session.state_dict()


def modules_alone():
    """The fused modules in a model of megatron-core, without any session."""
    from mindspeed_core.session import current
    from mindspeed_kernels.modules.activation import FusedSwiGLU
    from mindspeed_kernels.modules.norm import FusedRMSNorm
    from mindspeed_megatron.layer_spec import NORM_ROLES, SpecEditor

    try:
        current()
    except SessionError as error:
        alone = str(error)
    parallel()
    config = small(use_te_activation_func=True)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    editor = SpecEditor(spec, owner="")
    editor.replace(NORM_ROLES, FusedRMSNorm)
    editor.replace("core_attention", FusedCoreAttention)
    editor.replace("activation", FusedSwiGLU, empty=True)
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(3)
    # megatron-core's rotary embedding asks for a CUDA device, which a session of platform cpu answers.
    model = GPTModel(config, editor.spec, 64, 16, position_embedding_type="learned_absolute")
    tokens = torch.arange(32).reshape(2, 16)
    losses = model(tokens, torch.arange(16).expand(2, 16), None, labels=tokens)
    losses.mean().backward()
    gradients = all(parameter.grad is not None for parameter in model.parameters())
    with activate({}, platform="cpu", configs=[small()]) as session:
        plain = build(session, small(), position="learned_absolute")
        plain.load_state_dict(model.state_dict())
        return alone, gradients, torch.allclose(logits(plain), logits(model.eval()), atol=1e-5)


def test_modules_work_with_nothing_but_torch_and_megatron_core():
    assert run_world(modules_alone, 1) == [("no mindspeed session is open", True, True)]


class ScaledLogits:
    """Computes losses from logits of its own, and adds to them."""

    @hookimpl(wrapper=True)
    def compute_token_losses(self, logits):
        losses = yield
        return losses + logits.float().square().sum(-1).transpose(0, 1)


def test_logits_of_a_model_called_without_labels_pass_through_a_function(opened):
    session = opened({}, extra_plugins=[ScaledLogits()])
    labels, logits = torch.tensor([[0, 1]]), torch.ones(2, 1, 4)

    def losses(labels, logits):
        logits.zero_()
        return labels.float()

    with pytest.raises(SessionError, match=r"no model handed them over.*session\.token_losses"):
        session.loss(lambda output: (output.sum(), {}))(labels)
    made = session.token_losses(losses, labels, logits)
    assert made.tolist() == [[4.0, 5.0]]
    total, report = session.loss(lambda output: (output.mean(), {}))(made)
    assert (float(total), report) == (4.5, {})
    with pytest.raises(SessionError, match="one loss for each label"):
        session.token_losses(lambda labels, logits: logits[..., 0], labels.expand(3, 2), logits)


def test_a_model_through_the_session_hands_over_its_logits(opened):
    session = opened({}, extra_plugins=[ScaledLogits()])
    model = build(session, small())
    tokens = torch.arange(32).reshape(2, 16)
    positions = torch.arange(16).expand(2, 16)
    with torch.no_grad():
        made, seen = model(tokens, positions, None, labels=tokens), model(tokens, positions, None)
    plain = torch.nn.functional.cross_entropy(seen.transpose(1, 2), tokens, reduction="none")
    assert torch.allclose(made, plain + seen.square().sum(-1), atol=1e-5)
    session.close()
    assert "compute_language_model_loss" not in vars(model)


def test_a_model_that_cannot_hand_over_its_logits_is_refused(opened):
    session = opened({}, extra_plugins=[ScaledLogits()])
    foreign = torch.nn.Linear(2, 2)
    foreign.config = small()
    with pytest.raises(SessionError, match="no model here is a LanguageModule"):
        session.model(foreign)


def test_losses_of_a_step_are_reduced_with_those_of_features(opened):
    session = opened({})
    losses = session.reduce_losses(
        [{"lm loss": torch.tensor([6.0, 2.0])}, {"lm loss": torch.tensor([2.0, 2.0])}]
    )
    assert losses == {"lm loss": 2.0}
    step = session.train_step(
        lambda: StepResult(losses, skipped=False, grad_norm=None, num_zeros=None, counts=losses.counts)
    )
    assert step().loss_tokens == 4
