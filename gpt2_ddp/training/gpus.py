"""Peak FLOP/s and memory of GPUs, by exact name."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """Dense bf16 FLOP/s with fp32 accumulation, in 1e12; memory in GB (1e9 bytes), rounded down;
    whether it multiplies fp8 numbers, which Ampere does not."""

    tera: float
    memory: int
    fp8: bool = True


GPUS = {
    # NVIDIA A100 data sheet: 312 | 624 with sparsity
    "NVIDIA A100-SXM4-40GB": Gpu(312, 40, fp8=False),
    "NVIDIA A100-SXM4-80GB": Gpu(312, 80, fp8=False),
    "NVIDIA A100-PCIE-40GB": Gpu(312, 40, fp8=False),
    "NVIDIA A100 80GB PCIe": Gpu(312, 80, fp8=False),
    # NVIDIA A800 data sheet: 312 | 624 with sparsity
    "NVIDIA A800-SXM4-80GB": Gpu(312, 80, fp8=False),
    "NVIDIA A800 80GB PCIe": Gpu(312, 80, fp8=False),
    # NVIDIA A10 data sheet: 125 | 250 with sparsity
    "NVIDIA A10": Gpu(125, 24, fp8=False),
    # NVIDIA A10G data sheet, by AWS: 70 | 140 with sparsity
    "NVIDIA A10G": Gpu(70, 24, fp8=False),
    # NVIDIA A30 data sheet: 165 | 330 with sparsity
    "NVIDIA A30": Gpu(165, 24, fp8=False),
    # NVIDIA A40 data sheet: 149.7 | 299.4 with sparsity
    "NVIDIA A40": Gpu(149.7, 48, fp8=False),
    # NVIDIA L4 data sheet: 242 with sparsity
    "NVIDIA L4": Gpu(121, 24),
    # NVIDIA L40 data sheet: 181.05 | 362.1 with sparsity
    "NVIDIA L40": Gpu(181.05, 48),
    # NVIDIA L40S data sheet: 362.05 | 733 with sparsity
    "NVIDIA L40S": Gpu(362.05, 48),
    # NVIDIA H100 data sheet: SXM 1,979, PCIe 1,513, NVL 1,671, with sparsity
    "NVIDIA H100 80GB HBM3": Gpu(989.5, 80),
    "NVIDIA H100 PCIe": Gpu(756.5, 80),
    "NVIDIA H100 NVL": Gpu(835.5, 94),
    # NVIDIA H200 data sheet: SXM 1,979, NVL 1,671, with sparsity
    "NVIDIA H200": Gpu(989.5, 141),
    "NVIDIA H200 NVL": Gpu(835.5, 141),
    # NVIDIA H800 data sheet: SXM 1,979, PCIe 1,513, with sparsity
    "NVIDIA H800": Gpu(989.5, 80),
    "NVIDIA H800 PCIe": Gpu(756.5, 80),
    # NVIDIA H20 data sheet: 148 dense
    "NVIDIA H20": Gpu(148, 96),
    # NVIDIA GH200 data sheet: 1,979 with sparsity
    "NVIDIA GH200 480GB": Gpu(989.5, 96),
    "NVIDIA GH200 144G HBM3e": Gpu(989.5, 144),
    # NVIDIA HGX data sheet: 36,000 of eight GPUs, with sparsity
    "NVIDIA B200": Gpu(2250, 180),
    "NVIDIA B300 SXM6 AC": Gpu(2250, 270),
    # NVIDIA GB200 and GB300 NVL72 data sheets: 360,000 of 72 GPUs, with sparsity
    "NVIDIA GB200": Gpu(2500, 186),
    "NVIDIA GB300": Gpu(2500, 279),
    # NVIDIA RTX data sheet: tensor performance 309.7 (A6000), 222.2 (A5000), 153.4 (A4000), with
    # sparsity
    "NVIDIA RTX A6000": Gpu(154.85, 48, fp8=False),
    "NVIDIA RTX A5000": Gpu(111.1, 24, fp8=False),
    "NVIDIA RTX A4000": Gpu(76.7, 16, fp8=False),
    # NVIDIA RTX data sheet: tensor performance 1,457.0 (6000 Ada), 1,044.4 (5000 Ada), FP8 with
    # sparsity: 4 times
    "NVIDIA RTX 6000 Ada Generation": Gpu(364.25, 48),
    "NVIDIA RTX 5000 Ada Generation": Gpu(261.1, 32),
    # NVIDIA Ampere GA102 whitepaper: BF16 with FP32 accumulate
    "NVIDIA GeForce RTX 3090": Gpu(71, 24, fp8=False),
    # NVIDIA Ada whitepaper: BF16 with FP32 accumulate
    "NVIDIA GeForce RTX 3090 Ti": Gpu(80, 24, fp8=False),
    "NVIDIA GeForce RTX 4080": Gpu(97.5, 16),
    "NVIDIA GeForce RTX 4090": Gpu(165.2, 24),
    # NVIDIA RTX Blackwell whitepaper: BF16 with FP32 accumulate
    "NVIDIA GeForce RTX 5080": Gpu(112.6, 16),
    "NVIDIA GeForce RTX 5090": Gpu(209.5, 32),
}
"""By the name that `torch.cuda.get_device_name` returns. MIG slices, laptop GPUs and "D" models
have other names; they are not listed, since similar names may differ in speed. Data sheets often
print twice the FLOP/s, with sparsity."""


def peak_flops(name: str) -> float | None:
    """FLOP/s of the GPU of this name, the denominator of MFU; None if it is not in the table."""
    return GPUS[name].tera * 1e12 if name in GPUS else None
