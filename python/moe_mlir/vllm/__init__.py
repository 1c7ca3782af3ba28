"""A plug-in for vLLM: experts, routers and linear layers of its models by the kernels of this package.

vLLM loads it by itself where both packages are installed (the entry point `moe_mlir` of
`vllm.general_plugins`); the environment variable VLLM_PLUGINS says which plug-ins it loads.
docs/Serving.md says what it does.
"""

_registered = False


def register() -> None:
    """Puts kernels of this package in the place of vLLM's, on x86 CPUs.

    vLLM calls it in each of its processes before it makes a model, and more than once. A version
    of vLLM with other internals gets a warning, and keeps its own kernels.
    """
    global _registered
    if _registered:
        return
    _registered = True
    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import CpuArchEnum, current_platform

    logger = init_logger("vllm.plugins.moe_mlir")
    if not current_platform.is_cpu() or \
            current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        logger.debug("expected an x86 CPU for moe_mlir, found %s: vLLM's kernels stay",
                     current_platform.device_name)
        return
    try:
        from . import replace
    except (AttributeError, ImportError, KeyError) as error:
        logger.warning("expected vLLM 0.32 for moe_mlir, found %s: vLLM's kernels stay (%s)",
                       vllm.__version__, error)
        return
    replace.replace()


__all__ = ["register"]
