"""fp32 products stay fp32, whatever library computes them."""

import pytest
import torch

from megnorm.engine import products


@pytest.fixture(autouse=True)
def precision_restored():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_products_stay_fp32():
    kept = products.prefer_onednn()
    assert torch.get_float32_matmul_precision() == ("medium" if kept else "highest")
    assert products.worst_error() < products.FP32_ERROR


def test_a_machine_that_rounds_to_bf16_keeps_the_default(monkeypatch):
    def rounded(a, b):
        right = a.double() @ b.double()
        return float(((a.bfloat16() @ b.bfloat16()).double() - right).norm() / right.norm())

    monkeypatch.setattr(products, "_error", rounded)
    assert not products.prefer_onednn()
    assert torch.get_float32_matmul_precision() == "highest"
