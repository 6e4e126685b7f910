"""Both forms against plain cross-entropy in float64, value and both gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_reference import IGNORED, Inputs, gradients, make_inputs, reference
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dcp.loss import _rows, linear_cross_entropy

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"vocab_size": 30},
    {"temperature": 1.9, "label_smoothing": 0.2, "z_loss": 0.003, "vocab_size": 30},
]


@pytest.fixture(params=["compact", "static"], autouse=True)
def row_selection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with the CPU's selection of rows and with the GPU's static shapes."""
    monkeypatch.setattr(_rows, "_may_synchronise", lambda _: request.param == "compact")
    return str(request.param)


def assert_equal_gradients(value: torch.Tensor, expected: torch.Tensor, inputs: Inputs) -> None:
    for found, wanted in zip(gradients(value, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk_rows", [1, 5, 16, None])
@pytest.mark.parametrize("options", OPTIONS)
def test_sum_equals_plain(options: dict[str, Any], chunk_rows: int | None) -> None:
    inputs = make_inputs(real=30)
    found = linear_cross_entropy(*vars(inputs).values(), chunk_rows=chunk_rows, **options)
    expected = reference(inputs, **options)[0].sum()
    torch.testing.assert_close(found, expected)
    # A loss scale, a number of tokens: whatever the sum is multiplied by reaches the gradients.
    assert_equal_gradients(-2.5 * found, -2.5 * expected, inputs)


@pytest.mark.parametrize("chunk_rows", [5, None])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_equal_plain_under_any_objective(
    options: dict[str, Any], chunk_rows: int | None
) -> None:
    inputs = make_inputs(real=30)
    losses, entropy = linear_cross_entropy(
        *vars(inputs).values(),
        reduction="none",
        return_entropy=True,
        chunk_rows=chunk_rows,
        **options,
    )
    expected_losses, expected_entropy = reference(inputs, **options)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.linspace(-1, 2, len(losses), dtype=torch.float64)

    def objective(losses: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return (weights * (-losses).exp() - 0.3 * weights.square() * entropy).sum()

    assert_equal_gradients(
        objective(losses, entropy), objective(expected_losses, expected_entropy), inputs
    )


def test_weights_on_top_of_rows_reach_the_gradient() -> None:
    # Liger 968: a gradient made in the forward pass ignores weights that come later.
    inputs = make_inputs()
    weights = torch.rand(len(inputs.labels), dtype=torch.float64)
    found = (linear_cross_entropy(*vars(inputs).values(), reduction="none") * weights).sum()
    assert_equal_gradients(found, (reference(inputs)[0] * weights).sum(), inputs)


def test_entropy_alone_can_be_differentiated() -> None:
    inputs = make_inputs()
    _, entropy = linear_cross_entropy(
        *vars(inputs).values(), reduction="none", return_entropy=True, chunk_rows=4
    )
    assert_equal_gradients(entropy.sum(), reference(inputs)[1].sum(), inputs)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_one_temperature_a_row(reduction: Any) -> None:
    # verl 6110: [0.5, 1.0], here expanded from one per sequence; ignored rows hold anything.
    inputs = make_inputs(rows=12)
    temperature = torch.tensor([0.5, 1.0]).double().repeat_interleave(6)
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = reference(inputs, temperature=temperature, **options)[0].sum()
    given = torch.where(inputs.labels == IGNORED, torch.nan, temperature)
    found = linear_cross_entropy(
        *vars(inputs).values(), temperature=given, reduction=reduction, chunk_rows=5, **options
    ).sum()
    torch.testing.assert_close(found, expected)
    assert_equal_gradients(found, expected, inputs)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 9),
    vocab=st.integers(1, 50),
    chunk_rows=st.integers(1, 50),
    blocks=st.integers(1, 60),
    data=st.data(),
)
def test_any_shape_chunk_and_block(
    rows: int, width: int, vocab: int, chunk_rows: int, blocks: int, data: st.DataObject
) -> None:
    real = data.draw(st.integers(1, vocab))
    inputs = make_inputs(rows, width, vocab, real=real)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))).bool()
    labels = torch.where(mask, inputs.labels, IGNORED)
    reduction = data.draw(st.sampled_from(["sum", "none"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_dcp.loss._softmax._BLOCKS", blocks)
        found = linear_cross_entropy(
            *vars(inputs).values(),
            loss_mask=mask,
            reduction=reduction,
            chunk_rows=chunk_rows,
            vocab_size=real,
        ).sum()
        expected = reference(Inputs(inputs.hidden, inputs.weight, labels), vocab_size=real)[0].sum()
        torch.testing.assert_close(found, expected)
        assert_equal_gradients(found, expected, inputs)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_rows_may_hold_anything(reduction: Any, mask_dtype: torch.dtype, bad: float) -> None:
    # Megatron-Bridge 3117: NaN times mask 0 is NaN.
    inputs = make_inputs()
    counts = inputs.labels != IGNORED
    hidden = inputs.hidden.detach().masked_fill(~counts[:, None], bad).requires_grad_()
    labels = torch.where(counts, inputs.labels, 10**6)
    per_row = linear_cross_entropy(
        hidden,
        inputs.weight,
        labels,
        loss_mask=counts.to(mask_dtype),
        reduction=reduction,
        chunk_rows=5,
    )
    expected = reference(inputs)[0].sum()
    torch.testing.assert_close(per_row.sum(), expected)
    # What comes down to a row that does not count is not to be trusted either.
    of_rows = None
    if reduction == "none":
        assert bool((per_row[~counts] == 0).all())
        of_rows = torch.where(counts, 1.0, bad).double()
    found = torch.autograd.grad(per_row, (hidden, inputs.weight), of_rows)
    torch.testing.assert_close(found, gradients(expected, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_no_target_gives_exact_zeros(rows: int, reduction: Any, dtype: torch.dtype) -> None:
    # Megatron-LM 1764, NeMo 14488, Liger 177, PyTorch 75181: 0 / 0.
    inputs = make_inputs(rows=rows).to(dtype)
    labels = torch.full((rows,), IGNORED)
    loss = linear_cross_entropy(inputs.hidden, inputs.weight, labels, reduction=reduction)
    assert loss.dtype == torch.float32
    assert loss.shape == (() if reduction == "sum" else (rows,))
    assert loss.requires_grad
    assert loss.sum().item() == 0
    for gradient in gradients(loss.sum(), inputs):
        assert gradient.dtype == dtype
        assert bool((gradient == 0).all())


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_only_needed_gradients_are_made(needed: tuple[bool, bool], reduction: Any) -> None:
    full, inputs = make_inputs(), make_inputs()
    linear_cross_entropy(*vars(full).values()).backward()
    inputs.hidden.requires_grad_(needed[0])
    inputs.weight.requires_grad_(needed[1])
    with MatrixProducts() as products:
        loss = linear_cross_entropy(*vars(inputs).values(), reduction=reduction).sum()
        if any(needed):
            loss.backward()
    again = reduction == "none" and any(needed)
    assert products.count == 1 + again + sum(needed)
    assert loss.requires_grad == any(needed)
    torch.testing.assert_close(inputs.hidden.grad, full.hidden.grad if needed[0] else None)
    torch.testing.assert_close(inputs.weight.grad, full.weight.grad if needed[1] else None)


def test_sum_makes_no_more_products_than_plain() -> None:
    inputs = make_inputs()
    with MatrixProducts() as plain:
        F.cross_entropy(F.linear(inputs.hidden, inputs.weight), inputs.labels).backward()
    with MatrixProducts() as fused:
        linear_cross_entropy(*vars(inputs).values()).backward()
    assert fused.count == plain.count == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_logits_never_exist(reduction: Any, dtype: torch.dtype) -> None:
    rows, vocab = 2048, 512
    inputs = make_inputs(rows, 8, vocab).to(dtype)
    with MatrixProducts() as products:
        linear_cross_entropy(
            *vars(inputs).values(), reduction=reduction, temperature=0.5, label_smoothing=0.1
        ).sum().backward()
    logits = rows * vocab * dtype.itemsize
    assert products.most_bytes <= logits // 8
    assert products.most_bytes >= 128 * vocab * dtype.itemsize


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_autocast_does_not_lower_the_precision(reduction: Any) -> None:
    inputs = make_inputs().to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*vars(inputs).values(), reduction=reduction).sum()
        found = gradients(loss, inputs)
    plain = gradients(linear_cross_entropy(*vars(inputs).values()), inputs)
    torch.testing.assert_close(found, plain)


def test_no_grad_makes_no_gradient() -> None:
    inputs = make_inputs()
    with torch.no_grad(), MatrixProducts() as products:
        found = linear_cross_entropy(*vars(inputs).values())
    assert products.count == 1
    assert not found.requires_grad
    torch.testing.assert_close(found, reference(inputs)[0].sum().detach())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradient_flows_through_a_reshape(reduction: Any) -> None:
    # verl 6913: requires_grad read off the reshaped tensor: no gradient, and no error.
    inputs = make_inputs(rows=12, width=8)
    leaf = inputs.hidden.detach().reshape(3, 4, 8).requires_grad_()
    transposed = inputs.weight.detach().T.contiguous().requires_grad_()
    loss = linear_cross_entropy(
        leaf.reshape(-1, 8), transposed.T, inputs.labels, reduction=reduction, chunk_rows=5
    )
    loss.sum().backward()
    of_hidden, of_weight = gradients(reference(inputs)[0].sum(), inputs)
    assert leaf.grad is not None
    assert transposed.grad is not None
    torch.testing.assert_close(leaf.grad.reshape(-1, 8), of_hidden)
    torch.testing.assert_close(transposed.grad.T, of_weight)


def test_backward_twice_over_a_retained_graph() -> None:
    inputs = make_inputs()
    loss = linear_cross_entropy(*vars(inputs).values(), temperature=0.7, chunk_rows=5)
    loss.backward(torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
    first = inputs.weight.grad
    assert first is not None
    kept = first.clone()
    loss.backward(torch.tensor(-0.5, dtype=torch.float64))
    expected = gradients(2.5 * reference(inputs, temperature=0.7)[0].sum(), inputs)
    torch.testing.assert_close((inputs.hidden.grad, inputs.weight.grad), expected)
    assert not torch.equal(first, kept)


def test_gradients_add_up_over_micro_batches() -> None:
    inputs = make_inputs(rows=20)
    for rows in (slice(0, 7), slice(7, 20)):
        linear_cross_entropy(inputs.hidden[rows], inputs.weight, inputs.labels[rows]).backward()
    expected = gradients(reference(inputs)[0].sum(), inputs)
    torch.testing.assert_close((inputs.hidden.grad, inputs.weight.grad), expected)


def test_large_logits_keep_their_digits() -> None:
    inputs = make_inputs()
    large = Inputs(inputs.hidden * 100, inputs.weight, inputs.labels).to(torch.float32)
    exact = large.to(torch.float64)
    found = linear_cross_entropy(*vars(large).values())
    expected = reference(exact)[0].sum()
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    for ours, theirs in zip(gradients(found, large), gradients(expected, exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(300, 32, 999), (64, 7, 33)])
def test_error_is_no_larger_than_that_of_the_plain_loss(
    rows: int, width: int, vocab: int, reduction: Any, dtype: torch.dtype
) -> None:
    inputs = make_inputs(rows, width, vocab).to(dtype)
    exact = inputs.to(torch.float64)
    expected = reference(exact)[0].sum()
    expected_gradients = gradients(expected, exact)
    plain = F.cross_entropy(F.linear(inputs.hidden, inputs.weight), inputs.labels, reduction="sum")
    found = linear_cross_entropy(*vars(inputs).values(), reduction=reduction, chunk_rows=17).sum()
    assert found.dtype == torch.float32
    # float32 leaves both a few roundings and luck; float16 on a CPU rounds each chunk's product,
    # which is as fine as all else there.
    slack = {torch.bfloat16: 1.0, torch.float16: 1.25, torch.float32: 2.0}[dtype]
    assert _error(found, expected) <= slack * _error(plain, expected) + 1e-6
    for ours, plains, theirs in zip(
        gradients(found, inputs), gradients(plain, inputs), expected_gradients, strict=True
    ):
        assert ours.dtype == dtype
        assert _error(ours, theirs) <= slack * _error(plains, theirs)


def test_weight_gradient_of_many_chunks_is_added_up_in_float32() -> None:
    # In bfloat16 a sum of 512 equal shares stops growing at 256 times the share.
    rows = 512
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    linear_cross_entropy(hidden, weight, labels, vocab_size=2, chunk_rows=1).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-256.0, 256.0, 0.0]


def test_sure_prediction_keeps_its_gradient_in_bfloat16() -> None:
    # p - 1 is about -2e-4: it would be 0 if p were rounded to bfloat16 first.
    hidden = torch.full((1, 1), 8.5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.tensor([0])).backward()
    assert hidden.grad is not None
    expected = -1 / (1 + torch.tensor(8.5).exp())
    torch.testing.assert_close(hidden.grad.float().squeeze(), expected, rtol=8e-3, atol=0)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_nothing_waits_for_a_gpu(reduction: Any, dtype: torch.dtype, row_selection: str) -> None:
    # Fake tensors have no values: reading one on the host raises, and so does a wrong dtype.
    if row_selection == "compact":
        pytest.skip("the CPU's selection reads values")
    rows, device = 30, "cuda"
    with FakeTensorMode():
        hidden = torch.randn(rows, 4, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(50, 4, device=device, dtype=dtype, requires_grad=True)
        loss = linear_cross_entropy(
            hidden,
            weight,
            torch.zeros(rows, dtype=torch.long, device=device),
            loss_mask=torch.ones(rows, device=device),
            temperature=torch.ones(rows, device=device),
            vocab_size=40,
            chunk_rows=7,
            label_smoothing=0.1,
            z_loss=0.1,
            reduction=reduction,
        )
    assert loss.device.type == device
    assert loss.dtype == torch.float32


class MatrixProducts(TorchDispatchMode):
    """Counts the matrix products that run inside it, and finds the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.most_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_, aten.bmm)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most_bytes = max(self.most_bytes, result.untyped_storage().nbytes())
        return result
