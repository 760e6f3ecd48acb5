"""Which dims of a block's arguments and outputs are tokens or sequences, and how a call maps to static shapes."""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from graphlin.errors import StructureMismatch, UnsupportedModule
from graphlin.tier import Tier

ROLES = ("tokens", "seqs", "seqs+1")
_SIMPLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PLAIN = frozenset((bool, int, str, type(None)))
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType)  # compared by identity, and rightly so

Structure = tuple
Dims = Mapping[str, Any]


class Signature:
    """The parameters of a block's forward; binds calls to them in order."""

    def __init__(self, block: nn.Module) -> None:
        self._signature = inspect.signature(block.forward)
        parameters = list(self._signature.parameters.values())
        self.names = [p.name for p in parameters]
        self.cu = self.names.index("cu_seqlens") if "cu_seqlens" in self.names else None
        self.chunks = self.names.index("chunk_indices") if "chunk_indices" in self.names else None
        self.builds_table = self.cu is not None and self.chunks is not None
        self._defaults = [p.default for p in parameters]
        self._is_simple = all(p.kind in _SIMPLE for p in parameters)
        self._plans: dict[tuple, list[tuple[int, str]]] = {}

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> list:
        """One value for each parameter, defaults included; a TypeError names what does not fit."""
        form = len(args), *kwargs
        places = self._plans.get(form)
        if places is None:
            bound = self._signature.bind(*args, **kwargs)
            if not self._is_simple:
                bound.apply_defaults()
                return list(bound.arguments.values())
            places = self._plans[form] = [(self.names.index(name), name) for name in kwargs]
        values = self._defaults.copy()
        values[:len(args)] = args
        for place, name in places:
            values[place] = kwargs[name]
        return values

    def arguments(self, values: Sequence) -> tuple[tuple, dict[str, Any]]:
        """The inverse of `bind`: positional and keyword arguments of a call."""
        bound = inspect.BoundArguments(self._signature, OrderedDict(zip(self.names, values, strict=True)))
        return bound.args, bound.kwargs

    def call(self, block: nn.Module, values: Sequence) -> Any:
        args, kwargs = self.arguments(values)
        return block(*args, **kwargs)


class Nested(NamedTuple):
    """Structure of an argument that is a container."""

    spec: TreeSpec
    entries: tuple


def flatten(values: Sequence) -> tuple[list[torch.Tensor], Structure]:
    """The tensors among values, and a hashable description of everything else: constants with their types, containers.

    Raises TypeError for a constant that can't be compared at each call: one without hash, and one that is only compared by
    identity though its attributes may change.
    """
    leaves: list[torch.Tensor] = []
    structure = []
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            structure.append((kind, value))
        elif isinstance(value, torch.Tensor):
            leaves.append(value)
            structure.append(torch.Tensor)
        else:
            flat, spec = tree_flatten(value)
            entries = tuple(torch.Tensor if isinstance(v, torch.Tensor) else _constant(v) for v in flat)
            leaves += [v for v in flat if isinstance(v, torch.Tensor)]
            structure.append(Nested(spec, entries))
    return leaves, tuple(structure)


def _constant(value: Any) -> tuple:
    kind = type(value)
    if kind is float:  # bit for bit: 0.0 == -0.0, and nan is not even equal to itself
        return kind, value.hex()
    if not _has_value(value):
        raise TypeError(f"an argument of type {kind.__name__} is neither a tensor, a container of tensors nor a constant that "
                        "a graph can compare by value at each call. Pass what it holds as tensors and plain values, make it "
                        "a frozen dataclass, or keep it in the block.")
    return kind, value


def _has_value(value: Any) -> bool:
    """Whether equal means equal contents; an object that is only equal to itself may have changed since."""
    try:
        hash(value)
    except TypeError:
        return False
    has_attributes = hasattr(value, "__dict__") or hasattr(value, "__slots__")
    return type(value).__hash__ is not object.__hash__ or not has_attributes or isinstance(value, _FUNCTIONS)


def rebuild(structure: Structure, leaves: Sequence[torch.Tensor]) -> list:
    """The inverse of `flatten`."""
    rest = iter(leaves)

    def value(entry):
        if entry is torch.Tensor:
            return next(rest)
        if isinstance(entry, Nested):
            return tree_unflatten([value(e) for e in entry.entries], entry.spec)
        kind, constant = entry
        return float.fromhex(constant) if kind is float else constant
    return [value(entry) for entry in structure]


@dataclass(frozen=True)
class Role:
    """The dim of a tensor that varies, and what it counts; `extra` is 1 for cu_seqlens."""

    dim: int
    kind: str          # "tokens" or "seqs"
    extra: int = 0

    def size(self, tokens: int, seqs: int) -> int:
        return (tokens if self.kind == "tokens" else seqs) + self.extra


@dataclass(frozen=True)
class Leaf:
    """One tensor argument or output: its name, the varying dim (None: constant in shape) and the fixed sizes around it."""

    name: str
    role: Role | None
    before: tuple[int, ...]
    after: tuple[int, ...]

    @staticmethod
    def of(name: str, role: Role | None, tensor: torch.Tensor) -> "Leaf":
        shape = tuple(tensor.shape)
        return Leaf(name, role, shape, ()) if role is None else Leaf(name, role, shape[:role.dim], shape[role.dim + 1:])

    def shape(self, tokens: int, seqs: int) -> tuple[int, ...]:
        return self.before if self.role is None else self.before + (self.role.size(tokens, seqs),) + self.after

    def cut(self, tensor: torch.Tensor, tokens: int, seqs: int) -> torch.Tensor:
        """The part of a tensor of larger sizes that holds the first tokens or sequences, as a view."""
        return tensor if self.role is None else tensor.narrow(self.role.dim, 0, self.role.size(tokens, seqs))


@dataclass(frozen=True)
class Layout:
    """The tensors of one call structure: `cu` is the index of cu_seqlens, `tokens` and `seqs` of those that tell T and N."""

    leaves: tuple[Leaf, ...]
    cu: int | None
    tokens: int | None
    seqs: int | None

    @property
    def varies(self) -> bool:
        """Whether calls of this layout have different sizes; the others are captured at one shape, whatever the tiers."""
        return self.tokens is not None

    def sizes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """T and N of a call; raises StructureMismatch naming the tensor whose other sizes are not the captured ones."""
        shapes = [tensor.shape for tensor in tensors]
        counts = self.counts(shapes)
        expected = [before if count is None else before + (counts[count] + extra,) + after
                    for before, count, extra, after in self._forms]
        if shapes != expected:
            i = next(i for i, shape in enumerate(shapes) if shape != expected[i])
            raise StructureMismatch(f"{self.leaves[i].name}: expected shape {list(expected[i])} as captured, found "
                                    f"{list(shapes[i])}; other shapes run eagerly, or need their own capture")
        return counts

    def counts(self, shapes: Sequence[torch.Size]) -> tuple[int, int]:
        """T and N, as the tensors that tell them have them; 0 where none does, or where it has fewer dims than it should."""
        at, of = self.places
        try:
            tokens = 0 if at is None else shapes[at[0]][at[1]] - at[2]
            seqs = 0 if of is None else shapes[of[0]][of[1]] - of[2]
        except IndexError:  # one of the two: the other one still tells, or an error would name a tensor that fits
            tokens, seqs = (shapes[place[0]][place[1]] - place[2] if place and place[1] < len(shapes[place[0]]) else 0
                            for place in (at, of))
        return (tokens, seqs) if seqs >= 0 else (tokens, 0)

    @cached_property
    def places(self) -> list[tuple[int, int, int] | None]:
        """Where T and N are read: the index of a tensor, its dim, and by how much that is too large."""
        return [None if i is None else (i, (role := self.leaves[i].role).dim, role.extra) for i in (self.tokens, self.seqs)]

    @cached_property
    def _forms(self) -> list[tuple]:
        """`Leaf.shape` in parts, which are read at every call: sizes before, which count, what to add to it, sizes after."""
        return [(leaf.before, None, 0, ()) if (role := leaf.role) is None else
                (leaf.before, int(role.kind == "seqs"), role.extra, leaf.after) for leaf in self.leaves]


def make_layout(names: Sequence[str], structure: Structure, tensors: Sequence[torch.Tensor],
                dims: Dims | None) -> Layout:
    """Finds the role of every tensor, from `dims` or else from names and positions (never from equal sizes alone).

    By name and position: dim 0 of `cu_seqlens` is N + 1; dim 0 of arguments with `state` in their name is N; dim 1 of
    a `[1, T, ...]` tensor with the first tensor's T is tokens. What fits none, and every tensor of a block that takes
    no cu_seqlens, is constant in shape. Raises ValueError naming the argument where sizes contradict each other.
    """
    paths = _leaf_paths(names, structure)
    if dims is not None:
        roles = [_role_by_dims(dims, argument, path, tensor) for (argument, path), tensor in
                 zip(paths, tensors, strict=True)]
    elif any(argument == "cu_seqlens" for argument, _ in paths):
        roles = _roles_by_name([argument for argument, _ in paths], tensors)
    else:
        roles = [None] * len(paths)
    leaves = tuple(Leaf.of(argument + _show(path), role, tensor) for (argument, path), role, tensor in
                   zip(paths, roles, tensors, strict=True))
    return _checked(Layout(leaves, _first(leaves, "seqs", extra=1), _first(leaves, "tokens"), _first(leaves, "seqs")),
                    tensors)


def _first(leaves: Sequence[Leaf], kind: str, extra: int = 0) -> int | None:
    fits = [i for i, leaf in enumerate(leaves) if leaf.role and leaf.role.kind == kind and leaf.role.extra >= extra]
    return min(fits, key=lambda i: -leaves[i].role.extra, default=None)


def _checked(layout: Layout, tensors: Sequence[torch.Tensor]) -> Layout:
    if layout.tokens is None and layout.seqs is not None:
        raise ValueError("no argument holds tokens: expected the first tensor to be [1, T, ...] beside cu_seqlens; "
                         'name its dim with dims={"x": {1: "tokens"}}')
    shapes = [tensor.shape for tensor in tensors]
    tokens, seqs = layout.counts(shapes)
    for leaf, tensor in zip(layout.leaves, tensors, strict=True):
        if leaf.role and tensor.shape != leaf.shape(tokens, seqs):
            raise ValueError(f"{leaf.name}: expected shape {list(leaf.shape(tokens, seqs))} for {tokens} tokens in "
                             f"{seqs} sequences, found {list(tensor.shape)}; name the varying dims with dims= if they "
                             "differ")
    return layout


def _roles_by_name(arguments: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[Role | None]:
    first = tensors[0].shape
    roles: list[Role | None] = []
    for i, (argument, tensor) in enumerate(zip(arguments, tensors, strict=True)):
        is_state = "state" in argument and not argument.endswith("hidden_states") and i > 0
        if argument == "cu_seqlens":
            roles.append(Role(0, "seqs", 1))
        elif is_state and tensor.dim() > 0:
            roles.append(Role(0, "seqs"))
        elif tensor.dim() > 1 and len(first) > 1 and tensor.shape[0] == 1 and tensor.shape[1] == first[1]:
            roles.append(Role(1, "tokens"))
        else:
            roles.append(None)
    return roles


def _role_by_dims(dims: Dims, argument: str, path: tuple, tensor: torch.Tensor) -> Role | None:
    spec = dims.get(argument)
    for key in path:
        if isinstance(spec, Mapping | Sequence):
            spec = spec[_key(key)]
    if not spec:
        return None
    if len(spec) > 1:
        raise ValueError(f"dims[{argument!r}]: expected one varying dim a tensor, found {dict(spec)}")
    (dim, kind), = spec.items()
    if not isinstance(dim, int) or not 0 <= dim < tensor.dim():
        raise ValueError(f"dims[{argument!r}]: expected a dim in [0, {tensor.dim()}), found {dim!r}")
    return Role(dim, kind.removesuffix("+1"), int(kind.endswith("+1")))


def check_dims(dims: Dims | None, names: Sequence[str]) -> None:
    """Raises ValueError naming an argument that the forward lacks, or a role that does not exist."""
    for argument, spec in (dims or {}).items():
        if argument not in names:
            raise ValueError(f"dims: the block's forward has no argument {argument!r}; it has {', '.join(names)}")
        for role in tree_flatten(spec)[0]:
            if role is not None and role not in ROLES:
                raise ValueError(f"dims[{argument!r}]: expected roles among {ROLES}, found {role!r}")


def _leaf_paths(names: Sequence[str], structure: Structure) -> list[tuple[str, tuple]]:
    """Argument name and path in it of every tensor."""
    found: list[tuple[str, tuple]] = []
    for name, entry in zip(names, structure, strict=True):
        if entry is torch.Tensor:
            found.append((name, ()))
        elif isinstance(entry, Nested):
            numbered = tree_unflatten(range(len(entry.entries)), entry.spec)
            found += [(name, path) for path, i in tree_flatten_with_path(numbered)[0]
                      if entry.entries[i] is torch.Tensor]
    return found


def _key(key: Any) -> Any:
    if isinstance(key, SequenceKey):
        return key.idx
    return key.key if isinstance(key, MappingKey) else key.name if isinstance(key, GetAttrKey) else key


def _show(path: tuple) -> str:
    return "".join(f"[{_key(key)!r}]" for key in path)


def flatten_batch(values: list, signature: Signature, dims: Dims | None) -> tuple[int, int] | None:
    """Turns a dense call `[B, T, ...]` into the packed one of B equal sequences, in place; returns (B, T).

    None where the call is packed already, or the forward takes no cu_seqlens.
    """
    if signature.cu is None or values[signature.cu] is not None:
        return None
    first = next((v for v in values if isinstance(v, torch.Tensor)), None)
    if first is None or first.dim() < 2:
        return None
    batch, tokens = first.shape[:2]
    for i, (name, value) in enumerate(zip(signature.names, values, strict=True)):
        if isinstance(value, torch.Tensor) and value.shape[:2] == (batch, tokens) and _is_token_argument(
                name, value is first, dims):
            values[i] = value.reshape(1, batch * tokens, *value.shape[2:])
    values[signature.cu] = torch.arange(batch + 1, dtype=torch.int32, device=first.device) * tokens
    return batch, tokens


def _is_token_argument(name: str, is_first: bool, dims: Dims | None) -> bool:
    if dims is not None:
        return dims.get(name) == {1: "tokens"}
    return is_first or "state" not in name or name.endswith("hidden_states")


@dataclass(frozen=True)
class Output:
    """One tensor that the block returns: its varying dims and whether gradients flow into it."""

    roles: tuple[Role, ...]
    differentiable: bool

    def take(self, static: torch.Tensor, tokens: int, seqs: int, batch: tuple[int, int] | None,
             copy: bool = False) -> torch.Tensor:
        """The part of the static output that belongs to a call, as a view or a copy."""
        part = static
        for role in self.roles[:-1]:
            part = part.narrow(role.dim, 0, role.size(tokens, seqs))
        if self.roles:
            role = self.roles[-1]
            size = role.size(tokens, seqs)
            if copy and size == part.shape[role.dim]:  # of the three ways the one that costs the host least
                part = part.clone(memory_format=torch.contiguous_format)
            else:
                part = (part.narrow_copy if copy else part.narrow)(role.dim, 0, size)
        elif copy:
            part = part.clone()
        part = self.batched(part, batch)
        return part.detach() if part is static else part

    def batched(self, part: torch.Tensor, batch: tuple[int, int] | None) -> torch.Tensor:
        """A call's part of the output as that call should see it."""
        return part.reshape(*batch, *part.shape[2:]) if batch is not None and self.holds_batch(part) else part

    def holds_batch(self, static: torch.Tensor) -> bool:
        """Whether a dense call gets it back as [B, T, ...]."""
        return any(role.kind == "tokens" and role.dim == 1 for role in self.roles) and static.shape[0] == 1


def output_roles(name: str, shape: torch.Size, tier: Tier, other: torch.Size,
                 other_sizes: tuple[int, int]) -> tuple[Role, ...]:
    """Finds the varying dims of an output from its shapes at the tier and at other sizes.

    Raises UnsupportedModule for a size that follows neither tokens nor sequences, and where the dims are not as many.
    """
    roles = []
    if len(shape) != len(other):
        raise UnsupportedModule(f"{name} has shape {list(shape)} at {tier.tokens} tokens in {tier.seqs} sequences and "
                                f"{list(other)} at {other_sizes[0]} in {other_sizes[1]}: expected as many dims. Return "
                                "tensors of T rows or N rows from the block, whatever T is.")
    for dim, (size, seen) in enumerate(zip(shape, other, strict=True)):
        if size == seen:
            continue
        fits = [Role(dim, kind, extra) for kind, extra in (("tokens", 0), ("seqs", 0), ("seqs", 1))
                if (Role(dim, kind, extra).size(tier.tokens, tier.seqs), Role(dim, kind, extra).size(*other_sizes))
                == (size, seen)]
        if not fits:
            raise UnsupportedModule(f"{name} has shape {list(shape)} at {tier.tokens} tokens in {tier.seqs} sequences "
                                    f"and {list(other)} at {other_sizes[0]} in {other_sizes[1]}: dim {dim} is neither. "
                                    "Return tensors of T rows or N rows from the block.")
        roles.append(fits[0])
    return tuple(roles)
