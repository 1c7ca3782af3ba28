"""Ops in forked and spawned processes, and in several threads at once."""

import multiprocessing
import threading

import pytest
import torch
from op_calls import ALL_CALLS, normal, run
from support import run_tool

import moe_mlir

# Torch forms their products, in an order that follows its number of threads on some CPUs.
BY_TORCH = ("quantized_linear_backward",)
# Many rows: their kernels use all threads.
TOKENS, EXPERTS = 4096, 64


def detached(call):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in call]


def run_as_child(name, call):
    """With all threads, but where torch would form other sums with them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if name in BY_TORCH else threads)
    try:
        return run(name, call)
    finally:
        torch.set_num_threads(threads)


def work(queue):
    """In a child: a kernel that the parent has used, one that nobody has, and every op."""
    torch.set_num_threads(1)  # torch's own operators do not survive a fork otherwise
    z = normal(TOKENS, EXPERTS)
    queue.put(moe_mlir.topk_renorm(z, 8)[1].sum().item())
    queue.put(moe_mlir.topk_renorm(z, 7, route_scale=0.123)[1].sum().item())
    for name, call in ALL_CALLS.items():
        queue.put((name, [x.double().nan_to_num().sum().item() for x in run(name, detached(call))]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_forked_process_computes_as_its_parent():
    z = normal(TOKENS, EXPERTS)
    wanted = [moe_mlir.topk_renorm(z, 8)[1].sum().item()]
    results = [(name, run_as_child(name, detached(call))) for name, call in ALL_CALLS.items()]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,), daemon=True)
    child.start()
    child.join(120)
    hangs = child.is_alive()
    if hangs:
        child.kill()
    assert not hangs and child.exitcode == 0
    assert queue.get() == wanted[0]
    assert queue.get() == moe_mlir.topk_renorm(z, 7, route_scale=0.123)[1].sum().item()
    for name, tensors in results:
        assert queue.get() == (name, [x.double().nan_to_num().sum().item() for x in tensors])


def compute(queue, functions, h):
    torch.set_num_threads(1)
    for function in functions:
        queue.put(function(h).sum().item())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_process_that_is_forked_while_threads_compute(tmp_path):
    """Code of an artifact and of a model, both used, and in use while the child is made."""
    (tmp_path / "m.mlir").write_text(
        f"""func.func @choose(%z: tensor<?x{EXPERTS}xf32>) -> tensor<?x8xi64> {{
          %c0 = arith.constant 0 : index
          %n = tensor.dim %z, %c0 : tensor<?x{EXPERTS}xf32>
          %g = tensor.empty(%n) : tensor<?x8xf32>
          %i = tensor.empty(%n) : tensor<?x8xi64>
          %r:2 = moe.topk_renorm ins(%z : tensor<?x{EXPERTS}xf32>)
            outs(%g, %i : tensor<?x8xf32>, tensor<?x8xi64>)
            {{kind = #moe.score_kind<logits>}} -> tensor<?x8xf32>, tensor<?x8xi64>
          return %r#1 : tensor<?x8xi64>
        }}""")
    done = run_tool("moe-compile", "m.mlir", "-o", "choose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    h = normal(TOKENS, EXPERTS)
    model = torch.nn.Sequential(torch.nn.Linear(EXPERTS, EXPERTS), torch.nn.Softmax(-1))
    functions = [moe_mlir.load(tmp_path / "choose"), moe_mlir.compile(model, (h,))]
    wanted = [function(h).sum().item() for function in functions]
    context, stop = multiprocessing.get_context("fork"), threading.Event()

    def use(function):
        while not stop.is_set():
            function(h)

    threads = [threading.Thread(target=use, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    queue = context.SimpleQueue()
    child = context.Process(target=compute, args=(queue, functions, h), daemon=True)
    child.start()
    child.join(60)
    stop.set()
    for thread in threads:
        thread.join()
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert [queue.get() for _ in functions] == pytest.approx(wanted, rel=1e-6)


class Routed(torch.utils.data.Dataset):
    """Selects experts where the data is loaded."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return moe_mlir.topk_renorm(normal(TOKENS, EXPERTS, seed=index), 8)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_route(method):
    data = Routed()
    wanted = [data[n] for n in range(len(data))]
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=1, multiprocessing_context=method, timeout=120
    )
    found = [torch.cat(parts) for parts in zip(*loader, strict=True)]
    for a, b in zip(found, map(torch.stack, zip(*wanted, strict=True)), strict=True):
        assert torch.equal(a, b)


def test_threads_run_all_ops_at_once():
    wanted = {name: run(name, detached(call)) for name, call in ALL_CALLS.items()}
    wrong = []

    def each(shift):
        names = list(ALL_CALLS)
        for name in names[shift:] + names[:shift]:
            results = run(name, detached(ALL_CALLS[name]))
            same = (torch.equal(a.nan_to_num(), b.nan_to_num())
                    for a, b in zip(results, wanted[name], strict=True))
            if not all(same):
                wrong.append(name)

    threads = [threading.Thread(target=each, args=(5 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
