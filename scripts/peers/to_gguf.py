"""The weights of a GGUF file in another type, so that llama.cpp runs the very numbers that this project's base has.

Every field is copied; every matrix is dequantised and written as bfloat16,
float32 or 8 bits (Q8_0).
"""

import argparse
from pathlib import Path

TYPES = ("bf16", "f32", "q8_0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16")
    options = parser.parse_args()

    import gguf

    kind = gguf.GGMLQuantizationType[options.type.upper()]
    reader = gguf.GGUFReader(options.source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(options.target, architecture)
    skipped = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if name not in skipped and not name.startswith("GGUF."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(
        gguf.LlamaFileType[{"bf16": "MOSTLY_BF16", "f32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}[options.type]]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
