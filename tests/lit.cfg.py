# Configuration of the lit suite; the paths come from lit.site.cfg.py.
import glob
import os
import shutil

import lit.formats

config.name = "moe-mlir"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".mlir", ".test"]
config.excludes = ["python", "Inputs", "CMakeLists.txt"]
config.test_source_root = os.path.dirname(__file__)
config.test_exec_root = os.path.join(config.moe_build_dir, "tests")

config.environment["PATH"] = os.pathsep.join(
    [
        config.moe_tools_dir,
        config.llvm_tools_dir,
        config.mlir_tools_dir,
        os.path.dirname(config.python_executable),
        os.environ["PATH"],
    ]
)
config.environment["PYTHONPATH"] = config.moe_python_dir
for name in ("HOME", "CUDA_ROOT", "OMP_NUM_THREADS", "MOE_MLIR_CPU", "MOE_MLIR_SEED"):
    if name in os.environ:
        config.environment[name] = os.environ[name]
# Tests never read or fill the user's own cache.
config.environment["MOE_MLIR_CACHE_DIR"] = os.path.join(
    config.test_exec_root, "cache"
)

# A missing tool should be one clear error, not one odd failure a test.
for tool in ("moe-opt", "FileCheck", "not", "count"):
    if not shutil.which(tool, path=config.environment["PATH"]):
        lit_config.fatal(
            f"expected {tool} in the build or the toolchain, found none: "
            "build first with ./setup.sh"
        )

# The whole suite also runs with every input round-tripped through bytecode and
# generic form: MOE_MLIR_VERIFY_ROUNDTRIP=1 ./test
moe_opt = "moe-opt"
if os.environ.get("MOE_MLIR_VERIFY_ROUNDTRIP") == "1":
    moe_opt = "moe-opt --verify-roundtrip"

# What kernels ask for memory and threads is in our library.
runner_libraries = [
    os.path.join(os.path.dirname(config.mlir_tools_dir), "lib", "libmlir_c_runner_utils.so"),
    os.path.join(config.moe_python_dir, "moe_mlir", "libmoe_runtime.so"),
]

config.substitutions += [
    ("%moe-opt", moe_opt),
    # Runs @main of a module in the LLVM dialect.
    (
        "%run-cpu",
        "mlir-runner -e main -entry-point-result=void --shared-libs="
        + ",".join(runner_libraries),
    ),
    ("%mlir-opt", os.path.join(config.mlir_tools_dir, "mlir-opt")),
    ("%python", config.python_executable),
    ("%moe_lib_dir", config.moe_lib_dir),
    ("%moe_src", config.moe_source_dir),
]


def find_ptxas():
    """ptxas from PATH or from the wheel of NVIDIA's assembler."""
    on_path = shutil.which("ptxas", path=config.environment["PATH"])
    if on_path:
        return on_path
    prefix = os.path.dirname(os.path.dirname(config.python_executable))
    wheels = glob.glob(
        os.path.join(prefix, "lib/python3*/site-packages/nvidia/cu*/bin/ptxas")
    )
    return wheels[0] if wheels else None


ptxas = find_ptxas()
if ptxas:
    config.available_features.add("ptxas")
    config.substitutions.append(("%ptxas", ptxas))
if os.path.exists("/dev/nvidia0"):
    config.available_features.add("cuda-device")
