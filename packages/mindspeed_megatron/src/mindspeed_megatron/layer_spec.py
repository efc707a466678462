"""Find and replace modules in a megatron-core specification tree by the role they play.

A feature wraps the stage ``build_layer_spec`` and hands the result to a `SpecEditor`. The editor works on an
unshared copy: megatron-core puts one ``ModuleSpec`` object into many layers, and a change of one layer must
not change another. Who replaced what travels with the tree, as an attribute of each ``ModuleSpec`` that was
put in, so that a second feature at the same site gets an error that names the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed_core.discovery.slots import NORM_ROLES as NORM_ROLES
from mindspeed_megatron.layer_sites import HISTORY, history
from mindspeed_megatron.layer_sites import LayerSpecError as LayerSpecError
from mindspeed_megatron.layer_sites import LinearLayoutError as LinearLayoutError
from mindspeed_megatron.layer_sites import Replacement as Replacement
from mindspeed_megatron.layer_sites import Site as Site
from mindspeed_megatron.linear_layout import ANY_LAYOUT as ANY_LAYOUT
from mindspeed_megatron.linear_layout import LinearLayout as LinearLayout
from mindspeed_megatron.linear_layout import knows, layout_of, wrapped_argument
from mindspeed_megatron.spec_forms import as_spec, copied_partial, in_role

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

_ROLE_OF_FIELD = {
    "layer_specs": "layer",
    "transformer_layer": "layer",
    # Its name from megatron-core 0.17 on.
    "mtp_model_layer": "layer",
    "layer_norm": "final_layernorm",
    "activation_func": "activation",
}


@dataclass
class _Slot:
    """A site together with the object that holds it, and the specifications that declare to wrap it."""

    site: Site
    holder: Any
    key: str | int
    around: tuple[ModuleSpec, ...] = ()

    def read(self) -> Any:
        return getattr(self.holder, str(self.key)) if self._is_field else self.holder[self.key]

    def write(self, value: Any) -> None:
        if self._is_field:
            setattr(self.holder, str(self.key), value)
        else:
            self.holder[self.key] = value

    @property
    def _is_field(self) -> bool:
        return not isinstance(self.holder, (list, dict))


class SpecEditor:
    """Edits a copy of a megatron-core specification tree.

    The tree is a ``TransformerBlockSubmodules``, a ``MultiTokenPredictionBlockSubmodules`` or a single
    ``ModuleSpec``; dense and mixture-of-experts layers, multi-latent attention and multi-token prediction are
    all walked alike, through the dataclasses that hold their submodules.

    A role is the name of the field without ``linear_``: ``qkv``, ``proj``, ``fc1``, ``fc2``, ``q_down_proj``,
    ``core_attention``, ``self_attention``, ``input_layernorm``, ``mlp``, ``router``, ``experts``,
    ``shared_experts``, ``eh_proj``; besides, ``activation``, ``layer`` and ``final_layernorm``. A dotted role
    restricts the modules around: ``mlp.fc1`` is the first linear of a dense MLP, ``experts.fc1`` that of an
    expert.

    Options travel in ``ModuleSpec.params`` as frozen data. Specifications are copied, and process groups
    cannot be: pass a function without arguments that returns the group, and call it in the constructor.

    Attributes:
        spec: the edited tree; nothing of it is shared with the tree that was passed in.
        owner: the feature on whose behalf replacements are recorded; empty for the host, whose own choice of
            modules is what features start from and is not recorded.
    """

    def __init__(
        self,
        spec: Any,
        *,
        owner: str,
        session: Session | None = None,
        config: TransformerConfig | None = None,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> None:
        """Copy the tree.

        Args:
            spec: the tree.
            owner: name of the feature; empty for a host, whose defaults any feature may replace.
            session: counts what is replaced, so that a feature that matches nothing is noticed.
            config: makes layer numbers known; needed to select by layer.
            vp_stage: virtual pipeline stage of the chunk, with ``config``.
            pp_rank: pipeline rank of the chunk, with ``config``; by default this process's.

        Raises:
            LayerSpecError: the tree is none, or something in its params cannot be copied.
        """
        if not is_dataclass(spec) or isinstance(spec, type):
            raise LayerSpecError(f"{owner}: {spec!r} is no specification tree of megatron-core")
        self.owner = owner
        self.spec = _unshared(spec, "")
        self._session = session
        self._config = config
        self._vp_stage = vp_stage
        self._pp_rank = pp_rank
        if config is not None and pp_rank is None and config.pipeline_model_parallel_size == 1:
            self._pp_rank = 0

    def find(self, *roles: str, layers: Iterable[int] | None = None, empty: bool = False) -> list[Site]:
        """Return the sites with one of ``roles`` (all sites without), in the order of the tree.

        Args:
            roles: see the class.
            layers: only in these layers, by number in the whole model from 1.
            empty: also sites where nothing, or an identity, is specified.

        Raises:
            LayerSpecError: ``layers`` without the configuration.
        """
        return [slot.site for slot in self._slots(roles, layers, empty)]

    def replace(
        self,
        roles: str | Sequence[str],
        new: ModuleSpec | type | Callable[[Site], ModuleSpec | None],
        *,
        layers: Iterable[int] | None = None,
        empty: bool = False,
        wrap: bool = False,
        layouts: Collection[str] = (),
    ) -> int:
        """Put another specification at every matching site.

        Args:
            roles: one role or several.
            new: the specification (copied for each site), a class, or a function from the site to its new
                specification, or to None to leave it; `Site.carry` keeps submodules and params.
            layers: only in these layers, by number in the whole model from 1.
            empty: also fill sites where nothing, or an identity, is specified.
            wrap: the new module contains the one that was there, so another feature's replacement is fine.
            layouts: names of the layouts of linears that a wrapper knows beside megatron-core's, see
                `mindspeed_megatron.linear_layout`; ``ANY_LAYOUT`` where it adds nothing to input or output.

        Returns:
            How many sites changed.

        Raises:
            LayerSpecError: another feature has replaced a site and the new module does not wrap it.
            LinearLayoutError: a wrapper does not know the layout of the linear inside.
        """
        wanted = (roles,) if isinstance(roles, str) else tuple(roles)
        count, replaced = 0, set()
        present = {slot.site.role for slot in self._walk() if slot.site.spec is not None}
        # Innermost first, so that a module replaced as a whole carries its already replaced submodules.
        for slot in sorted(self._slots(wanted, layers, empty), key=lambda slot: -slot.site.path.count(".")):
            site = Site(**{**vars(slot.site), "spec": as_spec(slot.read())})
            if isinstance(new, ModuleSpec):
                chosen: ModuleSpec | None = new
            elif isinstance(new, type):
                chosen = ModuleSpec(module=new)
            else:
                chosen = new(site)
            if chosen is None:
                continue
            self._put(slot, site, chosen, wrap, layouts)
            count += 1
            replaced.add(".".join((*site.within, site.role)))
        if self._session is not None:
            self._session.place(
                self.owner, count, sought=wanted, present=present, replaced=() if wrap else replaced
            )
        return count

    @property
    def history(self) -> tuple[Replacement, ...]:
        """Return every replacement in the tree by any feature, in the order of the tree."""
        found: list[Replacement] = []
        for slot in self._walk():
            for spec in (slot.site.spec, *slot.around):
                found += [entry for entry in history(spec) if entry not in found] if spec is not None else []
        return tuple(found)

    def _put(self, slot: _Slot, site: Site, new: ModuleSpec, wrap: bool, layouts: Collection[str]) -> None:
        past = history(site.spec) if site.spec else ()
        others = [replacement for replacement in past if replacement.owner != self.owner]
        if others and not wrap:
            raise LayerSpecError(
                f"{self.owner} and {others[-1].owner} both replace {site.role} ({site.path}): "
                f"{others[-1].owner} put {others[-1].new} there, {self.owner} wants {_name(new)}. Use one of "
                f"the two features, or let {self.owner} contain what is there: wrap=True here, and "
                f'before = ("{others[-1].owner}",) in its declaration'
            )
        self._check_layouts(slot, site, new, layouts if wrap else None)
        chosen = _unshared(new, site.path)
        entry = Replacement(
            *(self.owner, site.role, site.path, _name(site.spec) if site.spec else None, _name(new)),
            layouts=tuple(sorted(layouts)),
        )
        chosen = in_role(chosen, site.role)
        setattr(chosen, HISTORY, (*past, entry) if self.owner else past)
        slot.write(chosen)

    def _check_layouts(
        self, slot: _Slot, site: Site, new: ModuleSpec, layouts: Collection[str] | None
    ) -> None:
        """Refuse a wrapper around a linear whose layout it does not know, whichever of the two came first.

        Args:
            slot: the place.
            site: what stands there.
            new: what is put there.
            layouts: those that it knows; None where it wraps nothing.

        Raises:
            LinearLayoutError: names both and the way out.
        """
        inside = layout_of(site.spec.module) if site.spec is not None else None
        if layouts is not None and inside is not None and not knows(layouts, inside):
            raise self._unknown_layout(site, self.owner, _name(new), site.placed_by, _name(site.spec), inside)
        own = layout_of(new.module)
        for wrapper in slot.around if own is not None else ():
            entry = (history(wrapper) or (Replacement("", site.role, site.path, None, _name(wrapper)),))[-1]
            if own is not None and not knows(frozenset(entry.layouts), own):
                raise self._unknown_layout(site, entry.owner, _name(wrapper), self.owner, _name(new), own)

    def _unknown_layout(
        self, site: Site, wraps: str, wrapper: str, owner: str, linear: str, layout: LinearLayout
    ) -> LinearLayoutError:
        plan = self._session.plan if self._session is not None else None
        asking = {feature.name: feature.why for feature in plan.features} if plan is not None else {}
        ways = [
            why if (why := asking.get(name, "")).startswith("--") else f"the feature {name}"
            for name in (layout.name, wraps)
        ]
        return LinearLayoutError(
            f"{wraps} puts {wrapper} around {site.role} ({site.path}), and {linear} of "
            f"{owner or layout.name} there {layout} ({layout.name}), not the parts of megatron-core's "
            f"linears, so that what is added would be wrong: drop {ways[0]} or {ways[1]}, or let {wraps} "
            f'name the layout where it knows it (SpecEditor.replace(layouts=("{layout.name}",)))'
        )

    def _slots(self, roles: Sequence[str], layers: Iterable[int] | None, empty: bool) -> list[_Slot]:
        numbers = None if layers is None else frozenset(layers)
        if numbers is not None and self._config is None:
            raise LayerSpecError(f"{self.owner}: layers can be selected only when the editor gets config=")
        return [
            slot
            for slot in self._walk()
            if (not roles or any(_matches(slot.site, role) for role in roles))
            and (empty or slot.site.spec is not None)
            and (numbers is None or slot.site.layer_number in numbers)
        ]

    def _walk(self) -> Iterator[_Slot]:
        root = self.spec.submodules if isinstance(self.spec, ModuleSpec) else self.spec
        yield from self._walk_fields(root, "", (), None)

    def _walk_fields(
        self, holder: Any, prefix: str, within: tuple[str, ...], layer: int | None
    ) -> Iterator[_Slot]:
        if not is_dataclass(holder):
            return
        for field in fields(holder):
            value = getattr(holder, field.name)
            role = _ROLE_OF_FIELD.get(field.name, field.name.removeprefix("linear_"))
            name = "layers" if field.name == "layer_specs" else field.name
            if isinstance(value, list) and all(_specifies(item) for item in value):
                numbers = self._layer_numbers(holder, len(value)) if role == "layer" else [layer] * len(value)
                for index, number in enumerate(numbers):
                    path = f"{prefix}{name}.{index}"
                    yield from self._walk_value(value, index, role, path, within, number)
            elif value is None or _specifies(value):
                yield from self._walk_value(holder, field.name, role, prefix + name, within, layer)

    def _walk_value(
        self, holder: Any, key: str | int, role: str, path: str, within: tuple[str, ...], layer: int | None
    ) -> Iterator[_Slot]:
        slot = _Slot(Site(role, path, layer, None, within), holder, key)
        spec = as_spec(slot.read())
        around: list[ModuleSpec] = []
        # What declares to wrap is passed through: the place is that of the module inside.
        while spec is not None and (inside := wrapped_argument(spec.module)) in spec.params:
            around.append(spec)
            path = f"{path}.{inside}"
            slot = _Slot(slot.site, spec.params, inside, tuple(around))
            spec = as_spec(slot.read())
        slot.site = Site(role, path, layer, spec, within, tuple(_name(wrapper) for wrapper in around))
        yield slot
        if spec is not None and spec.submodules is not None:
            yield from self._walk_fields(spec.submodules, path + ".", (*within, role), layer)

    def _layer_numbers(self, holder: Any, count: int) -> list[int | None]:
        if self._config is None:
            return [None] * count
        if type(holder).__name__.startswith("MultiTokenPrediction"):
            # megatron-core numbers prediction layers on behind the decoder's.
            return [self._config.num_layers + index + 1 for index in range(count)]
        layout = self._config.pipeline_model_parallel_layout
        if layout is not None:
            from megatron.core.transformer.enums import LayerType

            ids = layout.get_layer_id_list(LayerType.decoder, vp_stage=self._vp_stage, pp_rank=self._pp_rank)
            return [index + 1 for index in ids]
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        offset = get_transformer_layer_offset(self._config, self._vp_stage, self._pp_rank)
        return [offset + index + 1 for index in range(count)]


def _specifies(value: Any) -> bool:
    # ModuleSpec itself is callable only from megatron-core 0.16 on.
    return isinstance(value, ModuleSpec) or callable(value)


def _matches(site: Site, role: str) -> bool:
    *around, last = role.split(".")
    if last != site.role:
        return False
    return not around or site.within[-len(around) :] == tuple(around)


def _name(spec: ModuleSpec) -> str:
    module = spec.module
    return module[-1] if isinstance(module, tuple) else getattr(module, "__qualname__", repr(module))


def _unshared(value: Any, path: str) -> Any:
    """Copy a tree so that no two sites hold the same specification object, unlike ``copy.deepcopy``."""
    if isinstance(value, partial):
        return copied_partial(value, lambda name, item: _unshared(item, path))
    if callable(value) and not isinstance(value, ModuleSpec):
        return value
    if isinstance(value, ModuleSpec):
        fresh = copy.copy(value)
        fresh.params = {name: _copied(item, f"{path} param {name!r}") for name, item in value.params.items()}
        if hasattr(value, "metainfo"):
            fresh.metainfo = dict(value.metainfo)
        fresh.submodules = _unshared(value.submodules, path)
        return fresh
    if is_dataclass(value):
        fresh = copy.copy(value)
        for field in fields(value):
            inner = f"{path}.{field.name}" if path else field.name
            setattr(fresh, field.name, _unshared(getattr(value, field.name), inner))
        return fresh
    if isinstance(value, list):
        return [_unshared(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _copied(value: Any, where: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise LayerSpecError(
            f"{where}: {type(value).__name__} cannot be copied ({error}); specifications are copied for "
            "every layer, so pass a function without arguments that returns it"
        ) from error
