"""A rank's part of the whole model: names, tensor-parallel shards, and initial weights.

A pipeline stage counts its layers from 0, and an expert-parallel rank its experts. In the whole
model layers and experts have numbers of their own, which checkpoints use, and from which initial
weights are drawn: they are the same in any layout of ranks.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_dcp.parallel import ParallelContext

EXTRA_STATE = "_extra_state"
"""What torch calls the key of what a layer keeps besides weights and buffers."""


class WholeNames:
    """Turns this rank's parameter and buffer names into those of the whole model.

    They are of a Megatron-Core model, a ``ModuleList`` of a rank's chunks, or a module that has one
    of them somewhere.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._experts: dict[str, int] = {}
        self._prefixes: dict[str, str] = {}
        for prefix, part in module.named_modules():
            if isinstance(part, GPTModel):
                parent = module.get_submodule(prefix.rpartition(".")[0])
                is_chunk = bool(prefix) and isinstance(parent, torch.nn.ModuleList)
                self._add_chunk(prefix, part, is_chunk=is_chunk)

    def _add_chunk(self, prefix: str, chunk: GPTModel, *, is_chunk: bool) -> None:
        local = f"{prefix}." if prefix else ""
        whole = f"{local[:-1].rpartition('.')[0]}.".lstrip(".") if is_chunk else local
        if whole != local:
            self._prefixes[local] = whole
        layers = f"{local}decoder.layers."
        for index, layer in enumerate(chunk.decoder.layers):
            # Megatron-Core numbers layers from 1, over all stages and chunks.
            self._prefixes[f"{layers}{index}."] = f"{whole}decoder.layers.{layer.layer_number - 1}."
        for name, part in chunk.named_modules():
            if isinstance(part, MoELayer):
                self._experts[f"{local}{name}.experts."] = part.local_expert_indices[0]

    def __call__(self, name: str, tensor: Tensor | None = None) -> str:
        """The name in the whole model of this rank's ``name``.

        Of a last stage's copy of a tied embedding, told by its ``tensor``, the embedding's.
        """
        if tensor is not None and is_copy(name, tensor):
            name = name.removesuffix("output_layer.weight") + "embedding.word_embeddings.weight"
        first_expert = next(
            (first for prefix, first in self._experts.items() if name.startswith(prefix)), 0
        )
        # The longest: a layer's prefix starts with its chunk's.
        prefix = max((p for p in self._prefixes if name.startswith(p)), key=len, default="")
        if prefix:
            name = self._prefixes[prefix] + name.removeprefix(prefix)
        # Experts one by one are numbered in the path, TransformerEngine's at the end of the name.
        return re.sub(
            r"(\.local_experts\.|\.linear_fc[12]\.weight)(\d+)",
            lambda match: f"{match[1]}{int(match[2]) + first_expert}",
            name,
            count=1,
        )


def use_whole_names(model: Any, context: ParallelContext) -> None:
    """Gives this rank's part of the model a state dict by the names of the whole model.

    ``load_state_dict`` then takes a whole model's state in any layout, of which this rank's part is
    loaded, as well as what ``state_dict`` gave. A collective of all ranks; harmless twice.
    """
    if getattr(model, "has_whole_names", False):
        return
    model.has_whole_names = True
    names = WholeNames(model)
    mine = {names(name, tensor) for name, tensor in _tensors(model)}
    of_ranks = [mine]
    if context.sizes.parts:
        of_ranks *= context.sizes.world_size
        dist.all_gather_object(of_ranks, mine, group=context.host_group)
    of_all_ranks = set().union(*of_ranks)

    # Hooks get the model, since they are copied with it.
    def rename(model: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        names, tensors = WholeNames(model), dict(_tensors(model))
        # All out first: a name here may be another tensor's in the whole model.
        mine = {
            key.removeprefix(prefix): state.pop(key)
            for key in list(state)
            if key.startswith(prefix)
        }
        for name, value in mine.items():
            state[prefix + names(name, tensors.get(name))] = value

    def take_part(model: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        names = WholeNames(model)
        given = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        for name in given:
            del state[prefix + name]
        for name, tensor in _tensors(model):
            value = given.get(names(name, tensor))
            if value is None:
                continue
            if value.shape != tensor.shape and value.shape == whole_shape(tensor, context):
                value = split_for_tp(value, tensor, context)
            state[prefix + name] = value
        for name, part in model.named_modules():
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                # What TransformerEngine keeps for FP8 is no weight, and in no file.
                state[f"{prefix}{name}.{EXTRA_STATE}"] = part.get_extra_state()
        # What is no rank's is an error, which torch words.
        for name in given.keys() - of_all_ranks:
            if not name.endswith(EXTRA_STATE):
                state[prefix + name] = given[name]

    model.register_state_dict_post_hook(rename)
    model.register_load_state_dict_pre_hook(take_part)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the names in this process; a tied weight under all of its own."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def whole_shape(tensor: Tensor, context: ParallelContext) -> torch.Size:
    """The shape of the whole of which ``tensor``, a parameter or buffer, is this rank's part."""
    shape = list(tensor.shape)
    if _is_split(tensor):
        dim, _ = _partition(tensor)
        shape[dim] *= context.sizes.tensor_model_parallel_size
    return torch.Size(shape)


def merge_over_tp(tensor: Tensor, parameter: Tensor | None, context: ParallelContext) -> Tensor:
    """The whole of a tensor that tensor parallelism splits like ``parameter``; a collective."""
    tp_size = context.sizes.tensor_model_parallel_size
    if tp_size == 1 or not _is_split(parameter):
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(tp_size)]
    dist.all_gather(shards, tensor.contiguous(), group=context.pg_collection.tp)
    dim, stride = _partition(parameter)
    # A gated MLP's first layer is split stride-wise: each rank holds its part of both halves.
    strides = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([strides[rank][i] for i in range(stride) for rank in range(tp_size)], dim)


def split_for_tp(tensor: Tensor, parameter: Tensor | None, context: ParallelContext) -> Tensor:
    """This rank's part of a whole tensor that is split like ``parameter``."""
    tp_size = context.sizes.tensor_model_parallel_size
    if tp_size == 1 or not _is_split(parameter):
        return tensor
    dim, stride = _partition(parameter)
    # One piece of each stride: pieces lie stride by stride, and in each rank by rank.
    return torch.cat(tensor.chunk(stride * tp_size, dim)[context.tp_rank :: tp_size], dim)


def _is_split(parameter: Any) -> bool:
    is_whole_expert = getattr(parameter, "is_whole_expert", False)
    return getattr(parameter, "tensor_model_parallel", False) and not is_whole_expert


def mark_whole_experts(model: torch.nn.Module) -> None:
    """Tells experts apart from what tensor parallelism splits, which Megatron-Core does not.

    They have the same marks there: expert tensor parallelism is a size of its own, ours is 1.
    """
    for part in model.modules():
        if isinstance(part, MoELayer):
            for parameter in part.experts.parameters():
                parameter.is_whole_expert = True


def count_parameters(module: torch.nn.Module, context: ParallelContext) -> int:
    """Parameters of the whole model, in any layout of ranks; a collective."""
    groups, tp_size = context.pg_collection, context.sizes.tensor_model_parallel_size
    share = 0.0
    for name, parameter in module.named_parameters():
        if is_copy(name, parameter):
            continue
        if getattr(parameter, "allreduce", True):
            copies = groups.dp_cp.size() * (1 if _is_split(parameter) else tp_size)
        else:
            copies = groups.expt_dp.size()
        share += parameter.numel() / copies
    total = torch.tensor(share, dtype=torch.float64, device=context.device)
    dist.all_reduce(total)
    return round(float(total))


def _partition(parameter: Any) -> tuple[int, int]:
    return parameter.partition_dim, parameter.partition_stride


@torch.no_grad()
def initialize(
    model: torch.nn.Module, config: TransformerConfig, context: ParallelContext, *, seed: int
) -> None:
    """Draws the weights of ``model`` by their names in the whole model.

    Each tensor has a random state of its own, from the seed and the name, and is drawn whole: the
    weights do not depend on how ranks share them. Norms keep their ones.
    """
    names = WholeNames(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        whole_name = names(name, parameter)
        # crc32, since Python's own hash differs from process to process.
        torch.manual_seed(zlib.crc32(f"{seed}/{whole_name}".encode()))
        # Of the whole tensor, though a part is kept: the same numbers for any tensor-parallel size.
        whole = parameter.new_empty(whole_shape(parameter, context))
        _distribution(whole_name, config)(whole)
        parameter.copy_(split_for_tp(whole, parameter, context))


def _distribution(name: str, config: TransformerConfig) -> Any:
    if "word_embeddings" in name:
        return config.embedding_init_method
    ends_branch = re.search(r"\.(linear_proj\.weight|linear_fc2\.weight\d*)$", name)
    return config.output_layer_init_method if ends_branch else config.init_method


def is_copy(name: str, tensor: Tensor) -> bool:
    """Whether a last stage's output layer is its copy of a tied embedding."""
    return name.endswith("output_layer.weight") and bool(getattr(tensor, "shared_embedding", False))
