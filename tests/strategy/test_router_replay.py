"""Router replay through the Trainer: predict records, fit replays, and what cannot is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import trainers
from distributed import run_distributed
from lightning_dcp import DynamicCPModule, MoEConfig, ParquetDataModule, PredictionWriter
from lightning_dcp.data import collate_jagged

MOE = MoEConfig(num_experts=8, topk=2, ffn_hidden_size=16, router_replay=True)
CONFIG = replace(trainers.CONFIG, moe=MOE)
IDS = trainers.random_batch(trainers.LENGTHS[0], 0)
EP2 = {"expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}


def batch(routes: list[np.ndarray] | None = None) -> dict[str, torch.Tensor]:
    samples: list[dict[str, Any]] = [{"input_ids": ids} for ids in IDS]
    for sample, of_tokens in zip(samples, routes or [], strict=False):
        sample["routed_experts"] = torch.from_numpy(of_tokens)
    return collate_jagged(samples) | {"sample_id": torch.arange(len(IDS))}


def random_routes(lacking: int) -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [
        generator.random((len(ids) - lacking, 2, 8)).argsort(-1)[..., :2].astype(np.uint8)
        for ids in IDS
    ]


def predict(module, routes, cap, strategy, **options):
    data = trainers.Batches([], [batch(routes)])
    (outputs,) = trainers.trainer(cap, strategy, **options).predict(module, data)
    return outputs


def r2(cap, strategy, path):
    """Recorded routes, those of other weights with and without replay, losses of both."""
    recorder = trainers.module(model=CONFIG, record_routes=True, predict_everywhere=True)
    outputs = predict(recorder, None, cap, strategy, callbacks=[PredictionWriter(path)])
    recorded = [one.numpy() for one in outputs["routed_experts"].unbind()]
    found = {"dtype": str(outputs["routed_experts"].dtype), "recorded": recorded}
    options = {"model": CONFIG, "record_routes": True, "predict_everywhere": True, "seed": 2}
    for name, routes, replays in (
        ("replayed", recorded, True),
        ("ignored", recorded, False),
        ("live", None, True),
    ):
        other = trainers.module(**options, replay_routes=replays)
        outputs = predict(other, routes, cap, strategy)
        found[name] = [one.numpy() for one in outputs["routed_experts"].unbind()]
        trainers.trainer(cap, strategy).fit(other, trainers.Batches([batch(routes)]))
        found[f"{name} loss"] = float(other.last_step.loss)
    # Rank 0 has written the file.
    torch.distributed.barrier()
    stored = ParquetDataModule(path, global_batch_size=len(IDS), shuffle=False, num_workers=0)
    other = trainers.module(**options)
    trainers.trainer(cap, strategy).fit(other, stored)
    found["stored loss"] = float(other.last_step.loss)
    return found


def as_sets(routes: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(routes), -1)


@pytest.mark.parametrize(
    ("world", "cap", "strategy"),
    [(1, 256, {}), (4, 48, TP2 | EP2), (4, 48, PP2 | EP2)],
    ids=["1", "4-tp2-sp-ep2", "4-pp2-ep2"],
)
def test_what_predict_records_fit_replays(tmp_path, world, cap, strategy):
    path = str(tmp_path / "routes.parquet")
    ranks = run_distributed(r2, world, cap, strategy, path)
    for found in ranks:
        assert found["dtype"] == "torch.uint8"
        assert [one.shape for one in found["recorded"]] == [(len(ids), 2, 2) for ids in IDS]
        recorded = as_sets(found["recorded"])
        np.testing.assert_array_equal(as_sets(found["replayed"]), recorded)
        np.testing.assert_array_equal(as_sets(found["ignored"]), as_sets(found["live"]))
        assert (as_sets(found["live"]) != recorded).any(-1).mean() > 0.1
        assert found["ignored loss"] == pytest.approx(found["live loss"], rel=1e-6)
        assert found["stored loss"] == pytest.approx(found["replayed loss"], rel=1e-6)
        assert abs(found["replayed loss"] - found["live loss"]) > 1e-4
    table = pq.read_table(path).to_pydict()
    assert table["sample_id"] == list(range(len(IDS)))
    for stored, one in zip(table["routed_experts"], ranks[0]["recorded"], strict=True):
        assert stored == one.tolist()


def r3(cap, strategy):
    """Log-probabilities under a sampler's routes, which lack the last token's."""
    module = trainers.module(model=CONFIG, predict_everywhere=True)
    outputs = predict(module, random_routes(1), cap, strategy)
    assert set(outputs) == {"log_probs", "entropies", "sample_id"}
    return outputs["log_probs"].values().numpy()


def test_a_samplers_routes_give_the_same_in_any_layout():
    (single,) = run_distributed(r3, 1, 256, {})
    for strategy in (TP2 | EP2, EP2, EP2 | {"pad_to_length_bucket": 16}):
        for found in run_distributed(r3, 4, 48, strategy):
            np.testing.assert_allclose(found, single, rtol=1e-5, atol=1e-5)


def refusals():
    """What fit and predict say to routes that cannot be replayed."""
    routes = random_routes(0)
    unknown = [one.copy() for one in routes]
    unknown[3][32, 1] = [8, 0]
    short = [one.copy() for one in routes]
    short[5] = short[5][:-2]
    twice = [one.copy() for one in routes]
    twice[6][0, 0] = [7, 7]
    off = replace(CONFIG, moe=replace(MOE, router_replay=False))
    cases = {
        "dense": (trainers.CONFIG, routes),
        "off": (off, routes),
        "unknown": (CONFIG, unknown),
        "short": (CONFIG, short),
        "twice": (CONFIG, twice),
        "layers": (CONFIG, [one[:, :1] for one in routes]),
        "topk": (CONFIG, [one[..., :1] for one in routes]),
    }
    messages = {}
    for name, (config, given) in cases.items():
        samples = [
            {"input_ids": torch.tensor(ids), "routed_experts": torch.from_numpy(one)}
            for ids, one in zip(IDS, given, strict=True)
        ]
        offsets = torch.tensor([0, *np.cumsum([len(one) for one in given])])
        made = {
            "input_ids": collate_jagged([{"input_ids": ids} for ids in IDS])["input_ids"],
            "routed_experts": torch.nested.nested_tensor_from_jagged(
                torch.cat([sample["routed_experts"] for sample in samples]), offsets
            ),
        }
        data = trainers.Batches([made], [made])
        for run in ("fit", "predict"):
            trainer = trainers.trainer(48)
            try:
                getattr(trainer, run)(trainers.module(model=config), data)
                messages[name, run] = "no error"
            except ValueError as error:
                messages[name, run] = str(error)
    return messages


def test_routes_that_cannot_be_replayed_stop_every_rank():
    wanted = {
        "dense": "the model replays no routes",
        "off": "the model replays no routes",
        "unknown": "sample 3 names an expert that there is not at token 32, MoE layer 1: [8, 0]",
        "short": "sample 5 has 15 rows, its 'input_ids' 17 tokens",
        "twice": "sample 6 names one expert twice at token 0, MoE layer 0: [7, 7]",
        "layers": "has [1, 2] values a token; the model has 2 MoE layers and moe.topk=2: [2, 2]",
        "topk": "has [2, 1] values a token",
    }
    for messages in run_distributed(refusals, 2):
        for (name, run), message in messages.items():
            assert wanted[name] in message, (name, run)


def test_recording_needs_routers_that_can_be_asked():
    with pytest.raises(ValueError, match=r"record_routes=True needs.*found moe=None"):
        DynamicCPModule(trainers.CONFIG, record_routes=True)
    off = replace(CONFIG, moe=replace(MOE, router_replay=False))
    with pytest.raises(ValueError, match=r"record_routes=True needs.*found router_replay=False"):
        DynamicCPModule(off, record_routes=True)


class NoReplay(DynamicCPModule):
    def configure_model(self):
        super().configure_model()
        self.model.decoder.layers[1].mlp.router.router_replay = None


def with_a_deaf_router():
    module = NoReplay(CONFIG)
    try:
        trainers.trainer(256).fit(module, trainers.batches(1))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_model_with_a_router_that_does_not_replay_is_refused():
    (message,) = run_distributed(with_a_deaf_router, 1)
    assert "1 routers that replay on this rank, and 2 of its 2 MoE layers" in message
