"""Compiles every kernel as HIP for AMD GPUs, with clang and without ROCm. Nothing runs.

    python tests/gpu/compile_hip.py [--cxx clang++] [--arch gfx1030]

hip.h takes the place of HIP's headers. Success proves that the kernels use neither PTX nor functions that only CUDA has
outside of an #if, not that they are correct on such a GPU. This needs no package, only a clang with the target amdgcn,
such as Debian's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "llamac" / "gpu" / "kernels"
FLAGS = (
    *("-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", "-std=c++20", "-O0", "-ffp-contract=off", "-S"),
    *("-fno-strict-aliasing", f"-I{KERNELS}", f"-I{ROOT / 'csrc'}", "-include", str(Path(__file__).with_name("hip.h"))),
)
WAVES_OF_64 = "gfx90a"  # which the kernels refuse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cxx", default="clang++", help="the compiler (clang++)")
    parser.add_argument("--arch", default="gfx1030", help="a GPU whose waves have 32 lanes (gfx1030, RDNA 2)")
    options = parser.parse_args()
    targets = subprocess.run([options.cxx, "-print-targets"], capture_output=True, text=True, check=True).stdout
    if "amdgcn" not in targets:
        print(f"{options.cxx} has no target amdgcn: the kernels are not compiled for AMD")
        return 0
    files = sorted(KERNELS.glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda path: kernels(options.cxx, options.arch, path, Path(folder)), files)
        for path, names in zip(files, found, strict=True):
            print(f"{path.name}: {len(names)} kernels for {options.arch}", flush=True)
            if not names:
                sys.exit(f"{path.name} has no kernels for {options.arch}")
        try:
            kernels(options.cxx, WAVES_OF_64, files[0], Path(folder))
        except RuntimeError as error:
            if "waves of 32 lanes" in str(error):
                return 0
            raise
    sys.exit(f"the kernels compile for {WAVES_OF_64}, whose waves have 64 lanes")


def kernels(cxx: str, arch: str, path: Path, folder: Path) -> list[str]:
    """The names of a file's kernels, compiled to assembly.

    Raises:
        RuntimeError: The compiler refuses the file.
    """
    text = folder / f"{path.stem}-{arch}.s"
    command = [cxx, *FLAGS, f"--offload-arch={arch}", str(path), "-o", str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path.name} is refused for {arch}:\n{done.stderr[:4000]}")
    return re.findall(r"^\s*\.amdhsa_kernel (\w+)", text.read_text(), re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
