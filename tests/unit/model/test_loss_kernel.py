"""The Triton kernel of the loss against the formula that it stands for."""

import pytest
import torch

from ndtrain.data.batch import IGNORED
from ndtrain.model.loss import Vocabulary, loss_and_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 500, 4096, 5001, 128256])
def test_loss_and_gradient_are_the_formulas(vocabulary, dtype):
    logits = (torch.randn(33, vocabulary) * 3).to(dtype)
    targets = torch.randint(0, vocabulary, (33,))
    targets[::4] = IGNORED
    place = Vocabulary(0, vocabulary)
    loss, gradient = loss_and_gradient(logits, targets, place)
    on_device = logits.cuda()

    alone, _ = loss_and_gradient(on_device, targets.cuda(), place, loss_only=True)
    assert torch.equal(on_device.cpu(), logits)
    found, written = loss_and_gradient(on_device, targets.cuda(), place)

    assert written.data_ptr() == on_device.data_ptr()
    torch.testing.assert_close(found.cpu(), loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(alone.cpu(), loss, rtol=1e-6, atol=0)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(written.cpu(), gradient, rtol=rounding, atol=rounding)
    assert not written[::4].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad):
    logits = torch.zeros(3, 600, device="cuda")
    logits[1, 7] = bad
    targets = torch.tensor([1, 2, 3], device="cuda")
    loss, _ = loss_and_gradient(logits, targets, Vocabulary(0, 600))
    assert not torch.isfinite(loss)
