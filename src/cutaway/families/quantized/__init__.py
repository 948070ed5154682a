"""Quantized safetensors checkpoints. Their matrices are dequantized on loading, or stay packed in a block format.

| quant_method       | file                    | matrices                                               | packed as   |
|--------------------|-------------------------|--------------------------------------------------------|-------------|
| gptq               | `gptq.py`               | 2, 3 and 4 bits; groups, zero points, gptq and gptq_v2 | int4 groups |
|                    |                         | 8 bits                                                 | Q8_0        |
| awq                | `awq.py`                | 4 bits, version gemm                                   | int4 groups |
| bitsandbytes       | `bitsandbytes.py`       | nf4, also with double quantization                     | NF4         |
|                    |                         | fp4                                                    | dequantized |
|                    |                         | int8                                                   | Q8_0        |
| compressed-tensors | `compressed_tensors.py` | integers of 1 to 4 bits                                | int4 groups |
|                    |                         | integers of 5 to 8 bits                                | Q8_0        |
|                    |                         | fp8 with scales per tensor, row, group or block        | FP8_G128    |
|                    |                         | mxfp4                                                  | MXFP4       |
|                    |                         | nvfp4, mxfp8                                           | dequantized |
| fp8, fbgemm_fp8    | `fp8.py`                | fp8 with scales per tensor, row or block               | FP8_G128    |
| mxfp4              | `mxfp4.py`              | experts of gpt-oss                                     | dequantized |

int4 groups are packed as INT4_G128 if groups are multiples of 128 columns, else as Q4_0 or, with zero points, Q4_1.
A matrix stays packed if its columns are whole blocks and the columns of a block have one scale. INT4_G128 and FP8_G128
have blocks of 128 columns, NF4 of 64, the others of 32. Columns in activation order (GPTQ's desc_act) are stored in the
order of their groups, and products reorder x. 8-bit codes minus zero points outside of int8 are packed as INT8_G32, and
dequantized on a GPU.
"""

from cutaway.families.quantized.open import open_quantized, read_dtype

__all__ = ["open_quantized", "read_dtype"]
