"""Talks to moe-lsp-server: opens a file with a wrong op, prints the diagnostics
and what hovering says."""
import json
import subprocess
import sys

SOURCE = """func.func @f(%z: tensor<4x8xf32>, %g: tensor<4x9xf32>, %i: tensor<4x9xi32>) {
  %a, %b = moe.topk_renorm ins(%z : tensor<4x8xf32>) outs(%g, %i : tensor<4x9xf32>, tensor<4x9xi32>) -> tensor<4x9xf32>, tensor<4x9xi32>
  return
}
"""
URI = "test:///f.mlir"


def message(payload):
    body = json.dumps({"jsonrpc": "2.0", **payload})
    return f"Content-Length: {len(body)}\r\n\r\n{body}"


requests = [
    {"id": 0, "method": "initialize",
     "params": {"processId": None, "rootUri": None, "capabilities": {}}},
    {"method": "textDocument/didOpen",
     "params": {"textDocument": {"uri": URI, "languageId": "mlir",
                                 "version": 1, "text": SOURCE}}},
    {"id": 1, "method": "shutdown", "params": None},
    {"method": "exit"},
]
result = subprocess.run(
    [sys.argv[1]], input="".join(map(message, requests)), text=True,
    capture_output=True, timeout=60)
print(result.stdout)
print("exit code", result.returncode)
