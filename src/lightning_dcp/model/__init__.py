"""The model: Megatron-Core's GPTModel, with attention for packed sequences under any CP group."""

# First, for its side effect: Megatron-Core's notices at import stay away.
from lightning_dcp import _megatron as _megatron
from lightning_dcp.config.model import ModelConfig as ModelConfig
from lightning_dcp.config.model import Recompute as Recompute
from lightning_dcp.config.moe import MoEConfig as MoEConfig
from lightning_dcp.model.build import build_gpt_model as build_gpt_model
from lightning_dcp.model.build import build_model as build_model
from lightning_dcp.model.build import model_chunks as model_chunks
from lightning_dcp.model.forward import HiddenStates as HiddenStates
from lightning_dcp.model.forward import hidden_states as hidden_states
from lightning_dcp.model.forward import stage_output as stage_output
from lightning_dcp.model.forward import whole_logits as whole_logits
from lightning_dcp.model.global_names import use_whole_names as use_whole_names
from lightning_dcp.model.router_replay import check_routers as check_routers
from lightning_dcp.model.router_replay import gather_recorded as gather_recorded
from lightning_dcp.model.whole import WholeModel as WholeModel
