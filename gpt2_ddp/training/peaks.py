"""What a GPU can do at most, by its exact name: the denominator of MFU."""

from typing import NamedTuple


class Peak(NamedTuple):
    """Dense bf16 FLOP/s with fp32 accumulation, in 1e12; the form it is built in; and the figure's source, which often
    prints twice as much (with sparsity)."""

    tera: float
    form: str
    source: str


A100 = "NVIDIA A100 data sheet: 312 | 624 with sparsity"
A800 = "NVIDIA A800 data sheet: 312 | 624 with sparsity"
H100 = "NVIDIA H100 data sheet: SXM 1,979, PCIe 1,513, NVL 1,671, with sparsity"
H200 = "NVIDIA H200 data sheet: SXM 1,979, NVL 1,671, with sparsity"
H800 = "NVIDIA H800 data sheet: SXM 1,979, PCIe 1,513, with sparsity"
GH200 = "NVIDIA GH200 data sheet: 1,979 with sparsity"
HGX = "NVIDIA HGX data sheet: 36,000 of eight GPUs, with sparsity"
NVL72 = "NVIDIA GB200 and GB300 NVL72 data sheets: 360,000 of 72 GPUs, with sparsity"
GA102 = "NVIDIA Ampere GA102 whitepaper: BF16 with FP32 accumulate"
RTX_A = "NVIDIA RTX data sheet: tensor performance 309.7 (A6000), 222.2 (A5000), 153.4 (A4000), with sparsity"
ADA = "NVIDIA Ada whitepaper: BF16 with FP32 accumulate"
RTX_ADA = (
    "NVIDIA RTX data sheet: tensor performance 1,457.0 (6000 Ada), 1,044.4 (5000 Ada), FP8 with sparsity: four times"
)
BLACKWELL = "NVIDIA RTX Blackwell whitepaper: BF16 with FP32 accumulate"

PEAKS = {
    "NVIDIA A100-SXM4-40GB": Peak(312, "SXM", A100),
    "NVIDIA A100-SXM4-80GB": Peak(312, "SXM", A100),
    "NVIDIA A100-PCIE-40GB": Peak(312, "PCIe", A100),
    "NVIDIA A100 80GB PCIe": Peak(312, "PCIe", A100),
    "NVIDIA A800-SXM4-80GB": Peak(312, "SXM", A800),
    "NVIDIA A800 80GB PCIe": Peak(312, "PCIe", A800),
    "NVIDIA A10": Peak(125, "PCIe", "NVIDIA A10 data sheet: 125 | 250 with sparsity"),
    "NVIDIA A10G": Peak(70, "PCIe", "NVIDIA A10G data sheet, by AWS: 70 | 140 with sparsity"),
    "NVIDIA A30": Peak(165, "PCIe", "NVIDIA A30 data sheet: 165 | 330 with sparsity"),
    "NVIDIA A40": Peak(149.7, "PCIe", "NVIDIA A40 data sheet: 149.7 | 299.4 with sparsity"),
    "NVIDIA L4": Peak(121, "PCIe", "NVIDIA L4 data sheet: 242 with sparsity"),
    "NVIDIA L40": Peak(181.05, "PCIe", "NVIDIA L40 data sheet: 181.05 | 362.1 with sparsity"),
    "NVIDIA L40S": Peak(362.05, "PCIe", "NVIDIA L40S data sheet: 362.05 | 733 with sparsity"),
    "NVIDIA H100 80GB HBM3": Peak(989.5, "SXM", H100),
    "NVIDIA H100 PCIe": Peak(756.5, "PCIe", H100),
    "NVIDIA H100 NVL": Peak(835.5, "NVL", H100),
    "NVIDIA H200": Peak(989.5, "SXM", H200),
    "NVIDIA H200 NVL": Peak(835.5, "NVL", H200),
    "NVIDIA H800": Peak(989.5, "SXM", H800),
    "NVIDIA H800 PCIe": Peak(756.5, "PCIe", H800),
    "NVIDIA H20": Peak(148, "SXM", "NVIDIA H20 data sheet: 148 dense"),
    "NVIDIA GH200 480GB": Peak(989.5, "superchip", GH200),
    "NVIDIA GH200 144G HBM3e": Peak(989.5, "superchip", GH200),
    "NVIDIA B200": Peak(2250, "SXM", HGX),
    "NVIDIA B300 SXM6 AC": Peak(2250, "SXM", HGX),
    "NVIDIA GB200": Peak(2500, "superchip", NVL72),
    "NVIDIA GB300": Peak(2500, "superchip", NVL72),
    "NVIDIA RTX A6000": Peak(154.85, "PCIe", RTX_A),
    "NVIDIA RTX A5000": Peak(111.1, "PCIe", RTX_A),
    "NVIDIA RTX A4000": Peak(76.7, "PCIe", RTX_A),
    "NVIDIA RTX 6000 Ada Generation": Peak(364.25, "PCIe", RTX_ADA),
    "NVIDIA RTX 5000 Ada Generation": Peak(261.1, "PCIe", RTX_ADA),
    "NVIDIA GeForce RTX 3090": Peak(71, "PCIe", GA102),
    "NVIDIA GeForce RTX 3090 Ti": Peak(80, "PCIe", ADA),
    "NVIDIA GeForce RTX 4080": Peak(97.5, "PCIe", ADA),
    "NVIDIA GeForce RTX 4090": Peak(165.2, "PCIe", ADA),
    "NVIDIA GeForce RTX 5080": Peak(112.6, "PCIe", BLACKWELL),
    "NVIDIA GeForce RTX 5090": Peak(209.5, "PCIe", BLACKWELL),
}
"""By the name that `torch.cuda.get_device_name` gives. A MIG slice, a laptop's GPU and a "D" have names of their own,
and are not here: a name that is like another says nothing."""


def peak_flops(name: str) -> float | None:
    """FLOP/s of the GPU of this name; None if it is not in the table."""
    return PEAKS[name].tera * 1e12 if name in PEAKS else None
