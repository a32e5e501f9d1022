"""onnxruntime's MatMulNBits: weights of 4 or 8 bits in blocks that share a scale, on x86 and ARM (MLAS).

Activations are rounded to 8 bits with a scale per block of a row.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

PAIR = 2  # rows that the kernel computes at once
_FLOAT = 1  # ONNX's number for float32


@functools.cache
def has_onnxruntime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None and importlib.util.find_spec("onnx") is not None


class MatMulNBits:
    """y = x W^T with packed weights.

    Args:
        weight: uint8 (out, blocks, bytes of a block), low half of a byte first with 4 bits; 8 or 128 stands for zero.
        scale: (out, blocks).
        n_in: inputs; the last block may reach beyond them.
        bits: 4 or 8.
        block: weights in a block, a power of two.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, n_in: int, bits: int, block: int) -> None:
        import onnxruntime

        self._n_out = weight.size(0)
        self._pair: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = False
        # Spinning threads would take the cores from the next layer's torch kernels.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # The weights stand in a file of their own because onnxruntime gives those back once it has packed them. Given in
        # the model or as tensors they stay in memory beside the packed ones (12 to 19 MB instead of 6.5 for 6 MB of weights).
        with tempfile.TemporaryDirectory(prefix="mdi-nbits-") as folder:
            path = Path(folder) / "linear.onnx"
            _write_model(path, weight, scale.float(), n_in, bits, block)
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 (M, in) -> (M, out)

        The kernel takes rows in pairs and adds up a single one in another order. The last bits would say whether a row
        had a neighbour, and rounding in the next layer would make more of it; so an odd number of rows gets one more.
        """
        n_rows = rows.size(0)
        if n_rows <= PAIR:
            return self._multiply_pair(rows)
        if n_rows % PAIR:
            rows = F.pad(rows, (0, 0, 0, 1))
        rows = rows.contiguous()
        y = rows.new_empty(rows.size(0), self._n_out)
        self._session.run_with_iobinding(self._bind(rows, y))
        return y[:n_rows]

    def _multiply_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for one row or two, in memory that is bound once: binding takes a tenth of the kernel's time."""
        if self._pair is None:
            with torch.inference_mode(False):  # what is made in that mode could not be written to outside of it
                x, y = torch.zeros(PAIR, rows.size(1)), torch.empty(PAIR, self._n_out)
            self._pair = x, y, self._bind(x, y)
        x, y, binding = self._pair
        n_rows = rows.size(0)
        x[:n_rows] = rows  # beside a single row stands an old one, whose result nobody reads
        self._session.run_with_iobinding(binding)
        return y[:n_rows].clone()

    def _bind(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        binding = self._session.io_binding()
        binding.bind_input("x", "cpu", 0, _FLOAT, x.shape, x.data_ptr())
        binding.bind_output("y", "cpu", 0, _FLOAT, y.shape, y.data_ptr())
        return binding


def _write_model(path: Path, weight: torch.Tensor, scale: torch.Tensor, n_in: int, bits: int, block: int) -> None:
    from onnx import TensorProto, helper, save

    node = helper.make_node(
        "MatMulNBits", ["x", "weight", "scale"], ["y"], domain="com.microsoft",
        K=n_in, N=weight.size(0), bits=bits, block_size=block, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", n_in])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", weight.size(0)])],
        [
            helper.make_tensor("weight", TensorProto.UINT8, weight.shape, weight.numpy().tobytes(), raw=True),
            helper.make_tensor("scale", TensorProto.FLOAT, scale.shape, scale.numpy().tobytes(), raw=True),
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    save(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
