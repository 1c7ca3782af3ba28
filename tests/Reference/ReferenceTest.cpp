//===- ReferenceTest.cpp - Compiled ops against libtorch in float64 -------===//
//
// Usage: moe-reference-test OP
//
// Compiles an op for this CPU, runs it on tensors of libtorch and compares it
// with the formula of the specification, written with libtorch in float64 over
// the same f32 inputs. Prints one line a case; exits 1 if one is out of its
// tolerance (docs/Spec.md section 1). The lit test of each op is
// <op>.test beside this file.
//
//===----------------------------------------------------------------------===//

#include "CompiledFunction.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <map>

using torch::Tensor;
using torch::indexing::Slice;

namespace {
const auto kF32 = torch::kFloat32;
const auto kF64 = torch::kFloat64;
const auto kI32 = torch::kInt32;
constexpr double kEps = 0x1p-24;

bool allPassed = true;

void report(const std::string &name, double error, double tolerance) {
  bool passed = error <= tolerance; // false for NaN
  std::printf("%s: error %.3g, tolerance %.3g: %s\n", name.c_str(), error,
              tolerance, passed ? "ok" : "FAILED");
  allPassed &= passed;
}

void reportExact(const std::string &name, bool equal) {
  std::printf("%s: %s\n", name.c_str(), equal ? "equal" : "FAILED");
  allPassed &= equal;
}

double maxError(const Tensor &found, const Tensor &expected) {
  return (found.to(kF64) - expected).abs().max().item<double>();
}

/// The tolerance of probabilities whose logits reach `maxLogit` (section 1).
double probTolerance(double maxLogit) {
  return std::min(1.0, 1e-6 + 8 * kEps * maxLogit);
}

Tensor softmaxRows(const Tensor &logits) {
  // A row without support is zeros, not NaN (E6).
  return torch::softmax(logits, -1).nan_to_num(0.0);
}

Tensor causalMask(int64_t n) {
  return torch::ones({n, n}, torch::kBool).tril();
}

//===----------------------------------------------------------------------===//
// topk_renorm
//===----------------------------------------------------------------------===//

std::string topkSource(int64_t e, int64_t k, bool renorm) {
  std::string scores = "tensor<?x" + std::to_string(e) + "xf32>";
  std::string gates = "tensor<?x" + std::to_string(k) + "xf32>";
  std::string indices = "tensor<?x" + std::to_string(k) + "xi32>";
  return "func.func @select(%z: " + scores + ", %mask: tensor<?xi1>) -> (" +
         gates + ", " + indices + ") {\n" +
         "  %c0 = arith.constant 0 : index\n"
         "  %n = tensor.dim %z, %c0 : " +
         scores + "\n  %g0 = tensor.empty(%n) : " + gates +
         "\n  %i0 = tensor.empty(%n) : " + indices +
         "\n  %g, %i = moe.topk_renorm ins(%z : " + scores +
         ") mask(%mask : tensor<?xi1>) outs(%g0, %i0 : " + gates + ", " +
         indices + ") {renorm = " + (renorm ? "true" : "false") + "} -> " +
         gates + ", " + indices + "\n  return %g, %i : " + gates + ", " +
         indices + "\n}\n";
}

/// Scores with many exact ties: the order of a stable descending sort is the
/// specified one (E1).
void testTopK(int64_t n, int64_t e, int64_t k, bool renorm) {
  Tensor z = torch::randint(-8, 8, {n, e}).to(kF32) * 0.25;
  Tensor mask = torch::rand({n}) > 0.1;
  Tensor gates = torch::empty({n, k}, kF32);
  Tensor indices = torch::empty({n, k}, kI32);
  CompiledFunction select(topkSource(e, k, renorm));
  select({z, mask, gates, indices});

  Tensor wide = z.to(kF64);
  auto [sorted, order] = torch::sort(wide, /*stable=*/true, /*dim=*/-1,
                                     /*descending=*/true);
  Tensor chosen = order.index({Slice(), Slice(0, k)});
  Tensor probs = torch::softmax(wide, -1).gather(1, chosen);
  if (renorm)
    probs = probs / probs.sum(-1, /*keepdim=*/true);
  Tensor real = mask.unsqueeze(1);
  std::string name = "topk_renorm n=" + std::to_string(n) +
                     " e=" + std::to_string(e) + " k=" + std::to_string(k) +
                     (renorm ? " renorm" : " raw");
  reportExact(name + " indices", torch::equal(indices.to(torch::kInt64),
                                              torch::where(real, chosen, -1)));
  report(name + " gates", maxError(gates, torch::where(real, probs, 0.0)),
         probTolerance(z.abs().max().item<double>()));
}

void testTopKRenorm() {
  testTopK(37, 64, 8, true);
  testTopK(1, 16, 2, true);
  testTopK(100, 7, 7, false);
  testTopK(64, 160, 6, false);
}

//===----------------------------------------------------------------------===//
// similarity_inform
//===----------------------------------------------------------------------===//

void testSimilarityInform() {
  const char *source = R"mlir(
func.func @inform(%u: tensor<2x?x33xf32>, %e: tensor<2x?x7xf32>,
                  %mask: tensor<2x?xi1>) -> (tensor<2x?x7xf32>, tensor<2x?xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x33xf32>
  %p0 = tensor.empty(%n) : tensor<2x?x7xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %p, %l = moe.similarity_inform
      ins(%u, %e : tensor<2x?x33xf32>, tensor<2x?x7xf32>)
      mask(%mask : tensor<2x?xi1>)
      outs(%p0, %l0 : tensor<2x?x7xf32>, tensor<2x?xf32>)
      {tau = 3.0 : f64, visibility = #moe.visibility<causal>} -> tensor<2x?x7xf32>, tensor<2x?xf32>
  return %p, %l : tensor<2x?x7xf32>, tensor<2x?xf32>
}
)mlir";
  int64_t n = 141;
  Tensor u = torch::randn({2, n, 33});
  Tensor e = torch::softmax(torch::randn({2, n, 7}), -1);
  Tensor mask = torch::rand({2, n}) > 0.2;
  Tensor p = torch::empty({2, n, 7}), lse = torch::empty({2, n});
  CompiledFunction inform(source);
  inform({u, e, mask, p, lse});

  // S_ij = softmax_j(u_i.u_j / tau) over visible keys, P = S e.
  Tensor logits = u.to(kF64).matmul(u.to(kF64).transpose(1, 2)) / 3.0;
  Tensor visible = causalMask(n) & mask.unsqueeze(1) & mask.unsqueeze(2);
  Tensor shown = logits.masked_fill(~visible, -INFINITY);
  Tensor expected = softmaxRows(shown).matmul(e.to(kF64));
  double tolerance = probTolerance(logits.abs().max().item<double>());
  report("similarity_inform p", maxError(p, expected), tolerance);
  Tensor expectedLse = torch::logsumexp(shown, -1);
  Tensor finite = expectedLse.isfinite();
  reportExact("similarity_inform lse of unseen rows",
              torch::equal(lse.isfinite(), finite));
  report("similarity_inform lse",
         maxError(lse.masked_select(finite), expectedLse.masked_select(finite)),
         tolerance);
}

//===----------------------------------------------------------------------===//
// attention_posterior
//===----------------------------------------------------------------------===//

void testAttentionPosterior() {
  const char *source = R"mlir(
func.func @posterior(%q: tensor<2x4x?x8xf32>, %k: tensor<2x4x?x8xf32>,
    %u: tensor<2x?x20xf32>, %e: tensor<2x?x6xf32>, %v: tensor<2x4x?x8xf32>,
    %wo: tensor<4x20x8xf32>) -> (tensor<2x?x6xf32>, tensor<2xi32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x20xf32>
  %p0 = tensor.empty(%n) : tensor<2x?x6xf32>
  %h0 = tensor.empty() : tensor<2xi32>
  %l0 = tensor.empty(%n) : tensor<2x1x?xf32>
  %l1 = tensor.empty(%n) : tensor<2x1x?xf32>
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>,
          tensor<2x?x20xf32>, tensor<2x?x6xf32>)
      values(%v, %wo : tensor<2x4x?x8xf32>, tensor<4x20x8xf32>)
      outs(%p0, %h0, %l0, %l1 : tensor<2x?x6xf32>, tensor<2xi32>,
           tensor<2x1x?xf32>, tensor<2x1x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x6xf32>, tensor<2xi32>, tensor<2x1x?xf32>, tensor<2x1x?xf32>
  return %r#0, %r#1 : tensor<2x?x6xf32>, tensor<2xi32>
}
)mlir";
  int64_t n = 53;
  Tensor q = torch::randn({2, 4, n, 8}), k = torch::randn({2, 4, n, 8});
  Tensor u = torch::randn({2, n, 20}), v = torch::randn({2, 4, n, 8});
  Tensor wo = torch::randn({4, 20, 8}) * 0.3;
  Tensor e = torch::softmax(torch::randn({2, n, 6}), -1);
  Tensor p = torch::empty({2, n, 6}), head = torch::empty({2}, kI32);
  CompiledFunction posterior(source);
  posterior({q, k, u, e, v, wo, p, head});

  // Prior A_h, its entropies, h* = argmin_h mean_i H(A_h[i]) (15).
  Tensor prior = q.to(kF64).matmul(k.to(kF64).transpose(2, 3)) / std::sqrt(8.0);
  prior = prior.masked_fill(~causalMask(n), -INFINITY);
  Tensor a = softmaxRows(prior);
  Tensor entropy = -torch::special::xlogy(a, a).sum(-1).mean(-1);
  Tensor expectedHead = entropy.argmin(1);
  reportExact("attention_posterior head",
              torch::equal(head.to(torch::kInt64), expectedHead));
  // A'_h = softmax_j(l + u.v' - |v'|^2/2), v' = wo_h v, sigma = 1 (21).
  Tensor means = torch::einsum("hdc,bhjc->bhjd", {wo.to(kF64), v.to(kF64)});
  Tensor product = torch::einsum("bid,bhjd->bhij", {u.to(kF64), means});
  Tensor half = means.square().sum(-1).unsqueeze(2) / 2;
  Tensor all = softmaxRows(prior + product - half);
  Tensor expected = torch::empty({2, n, 6}, kF64);
  for (int64_t b = 0; b < 2; ++b)
    expected[b] = all[b][expectedHead[b].item<int64_t>()].matmul(e[b].to(kF64));
  double maxLogit =
      prior.masked_fill(~causalMask(n), 0.0).abs().max().item<double>() +
      product.abs().max().item<double>() + half.max().item<double>();
  report("attention_posterior p", maxError(p, expected),
         probTolerance(maxLogit));
}

//===----------------------------------------------------------------------===//
// Gradients, against libtorch's autograd in float64
//===----------------------------------------------------------------------===//

/// A float64 leaf with the values of `tensor`.
Tensor leaf(const Tensor &tensor) {
  return tensor.to(kF64).detach().requires_grad_();
}

/// 20 times the forward's bound, scaled by the largest gradient.
void reportGradient(const std::string &name, const Tensor &found,
                    const Tensor &expected, double forwardTolerance) {
  report(name, maxError(found, expected),
         20 * forwardTolerance * expected.abs().max().item<double>());
}

/// All forms of the gradient of a selection; tokens of index -1 are padding.
void testTopKBackward(const std::string &kind, const std::string &score,
                      bool renorm) {
  constexpr int64_t n = 61, e = 19, k = 5;
  constexpr double scale = 2.5;
  bool isProbs = kind == "probs";
  std::string source =
      R"mlir(
func.func @gradient(%dg: tensor<?x5xf32>, %g: tensor<?x5xf32>,
    %i: tensor<?x5xi32>, %x: tensor<?x19xf32>) -> tensor<?x19xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x19xf32>
  %0 = tensor.empty(%n) : tensor<?x19xf32>
  %dx = moe.topk_renorm_backward
      ins(%dg, %g, %i : tensor<?x5xf32>, tensor<?x5xf32>, tensor<?x5xi32>)
      scores(%x : tensor<?x19xf32>) outs(%0 : tensor<?x19xf32>)
      {route_scale = 2.5 : f64, kind = #moe.score_kind<)mlir" +
      kind + ">, score = #moe.score_function<" + score +
      ">, renorm = " + (renorm ? "true" : "false") +
      "} -> tensor<?x19xf32>\n  return %dx : tensor<?x19xf32>\n}\n";
  CompiledFunction gradient(source);

  Tensor x = torch::randn({n, e}) * 3;
  if (isProbs)
    x = torch::softmax(x, -1);
  Tensor mask = (torch::rand({n}) > 0.2).unsqueeze(1);
  Tensor wide = leaf(x), s = wide;
  if (score == "softmax")
    s = torch::softmax(wide, -1);
  else if (score == "sigmoid")
    s = torch::sigmoid(wide);
  else if (score == "sqrtsoftplus")
    s = torch::log1p(wide.exp()).sqrt();
  Tensor chosen = std::get<1>(torch::topk(wide.detach(), k, -1));
  Tensor v = s.gather(1, chosen);
  Tensor gates = renorm ? v / v.sum(-1, /*keepdim=*/true) : v;
  gates = torch::where(mask, gates * scale, 0.0);
  Tensor dgates = torch::randn({n, k});
  gates.backward(dgates.to(kF64));

  Tensor indices = torch::where(mask, chosen, -1).to(kI32).contiguous();
  Tensor dx = torch::empty({n, e});
  gradient({dgates, gates.detach().to(kF32), indices, x, dx});
  reportGradient(
      "topk_renorm_backward " + score + (renorm ? " renorm" : " raw"), dx,
      wide.grad(), probTolerance(isProbs ? 0.0 : x.abs().max().item<double>()));
}

void testTopKRenormBackward() {
  for (bool renorm : {true, false}) {
    for (const char *score : {"softmax", "sigmoid", "sqrtsoftplus"})
      testTopKBackward("logits", score, renorm);
    testTopKBackward("probs", "none", renorm);
  }
}

/// The gradient of the gate is the gate with the adjacency transposed.
void testAdjacencyGateBackward() {
  CompiledFunction gradient(R"mlir(
func.func @gradient(%dg: tensor<?x9xf32>, %a: tensor<9x9xf32>) -> tensor<?x9xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %dg, %c0 : tensor<?x9xf32>
  %0 = tensor.empty(%n) : tensor<?x9xf32>
  %dp = moe.adjacency_gate ins(%dg, %a : tensor<?x9xf32>, tensor<9x9xf32>)
      outs(%0 : tensor<?x9xf32>) {threshold = 0.3 : f64} -> tensor<?x9xf32>
  return %dp : tensor<?x9xf32>
}
)mlir");
  Tensor a = torch::rand({9, 9}), dg = torch::randn({53, 9});
  Tensor p = leaf(torch::softmax(torch::randn({53, 9}), -1));
  Tensor kept = torch::where(a >= 0.3f, a, 0.0f).to(kF64);
  p.matmul(kept.t()).backward(dg.to(kF64));
  Tensor dp = torch::empty({53, 9});
  gradient({dg, a.t().contiguous(), dp});
  reportGradient("adjacency_gate_backward dp", dp, p.grad(), 1e-6);
}

void testSimilarityInformBackward() {
  CompiledFunction gradient(R"mlir(
func.func @gradient(%u: tensor<2x?x33xf32>, %e: tensor<2x?x7xf32>,
    %p: tensor<2x?x7xf32>, %lse: tensor<2x?xf32>, %dp: tensor<2x?x7xf32>,
    %ws: tensor<33x33xf32>, %mask: tensor<2x?xi1>, %tau: tensor<f32>)
    -> (tensor<2x?x33xf32>, tensor<2x?x7xf32>, tensor<33x33xf32>, tensor<f32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x33xf32>
  %t = tensor.extract %tau[] : tensor<f32>
  %du0 = tensor.empty(%n) : tensor<2x?x33xf32>
  %de0 = tensor.empty(%n) : tensor<2x?x7xf32>
  %dws0 = tensor.empty() : tensor<33x33xf32>
  %dt0 = tensor.empty() : tensor<f32>
  %r:4 = moe.similarity_inform_backward
      ins(%u, %e, %p, %lse, %dp : tensor<2x?x33xf32>, tensor<2x?x7xf32>,
          tensor<2x?x7xf32>, tensor<2x?xf32>, tensor<2x?x7xf32>)
      ws(%ws : tensor<33x33xf32>) mask(%mask : tensor<2x?xi1>) tau(%t : f32)
      outs(%du0, %de0, %dws0, %dt0 : tensor<2x?x33xf32>, tensor<2x?x7xf32>,
           tensor<33x33xf32>, tensor<f32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x33xf32>, tensor<2x?x7xf32>, tensor<33x33xf32>, tensor<f32>
  return %r#0, %r#1, %r#2, %r#3 : tensor<2x?x33xf32>, tensor<2x?x7xf32>,
      tensor<33x33xf32>, tensor<f32>
}
)mlir");
  int64_t n = 141;
  Tensor u = torch::randn({2, n, 33}), ws = torch::randn({33, 33}) * 0.2;
  Tensor e = torch::softmax(torch::randn({2, n, 7}), -1);
  Tensor mask = torch::rand({2, n}) > 0.2, tau = torch::tensor(1.7f);
  Tensor dp = torch::randn({2, n, 7});

  Tensor wideU = leaf(u), wideE = leaf(e), wideWs = leaf(ws),
         wideTau = leaf(tau);
  Tensor logits = wideU.matmul(wideWs).matmul(wideU.transpose(1, 2)) / wideTau;
  Tensor visible = causalMask(n) & mask.unsqueeze(1) & mask.unsqueeze(2);
  // Rows that see nothing are kept finite, and out of p.
  Tensor shown = logits.masked_fill(~visible, -1e30);
  Tensor p = (torch::softmax(shown, -1) * visible).matmul(wideE);
  Tensor lse = torch::where(mask, torch::logsumexp(shown, -1), -INFINITY);
  p.backward(dp.to(kF64));

  Tensor du = torch::empty_like(u), de = torch::empty_like(e);
  Tensor dws = torch::empty_like(ws), dtau = torch::empty_like(tau);
  gradient({u, e, p.detach().to(kF32), lse.detach().to(kF32), dp, ws, mask, tau,
            du, de, dws, dtau});
  double tolerance = probTolerance(logits.abs().max().item<double>());
  reportGradient("similarity_inform_backward du", du, wideU.grad(), tolerance);
  reportGradient("similarity_inform_backward de", de, wideE.grad(), tolerance);
  reportGradient("similarity_inform_backward dws", dws, wideWs.grad(),
                 tolerance);
  // One sum over all pairs, whose terms cancel: judged by the sum of the rows'.
  double scale = (wideU.grad() * u).abs().sum().item<double>();
  report("similarity_inform_backward dtau", maxError(dtau, wideTau.grad()),
         20 * tolerance * scale);
}

void testAttentionPosteriorBackward() {
  CompiledFunction gradient(R"mlir(
func.func @gradient(%q: tensor<2x4x?x8xf32>, %k: tensor<2x4x?x8xf32>,
    %u: tensor<2x?x20xf32>, %e: tensor<2x?x6xf32>, %p: tensor<2x?x6xf32>,
    %l1: tensor<2x4x?xf32>, %l2: tensor<2x4x?xf32>, %dp: tensor<2x?x6xf32>,
    %v: tensor<2x4x?x8xf32>, %wo: tensor<4x20x8xf32>)
    -> (tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>, tensor<2x?x20xf32>,
        tensor<2x?x6xf32>, tensor<2x4x?x8xf32>, tensor<4x20x8xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x20xf32>
  %0 = tensor.empty(%n) : tensor<2x4x?x8xf32>
  %1 = tensor.empty(%n) : tensor<2x4x?x8xf32>
  %2 = tensor.empty(%n) : tensor<2x?x20xf32>
  %3 = tensor.empty(%n) : tensor<2x?x6xf32>
  %4 = tensor.empty(%n) : tensor<2x4x?x8xf32>
  %5 = tensor.empty() : tensor<4x20x8xf32>
  %r:6 = moe.attention_posterior_backward
      ins(%q, %k, %u, %e, %p, %l1, %l2, %dp : tensor<2x4x?x8xf32>,
          tensor<2x4x?x8xf32>, tensor<2x?x20xf32>, tensor<2x?x6xf32>,
          tensor<2x?x6xf32>, tensor<2x4x?xf32>, tensor<2x4x?xf32>,
          tensor<2x?x6xf32>)
      values(%v, %wo : tensor<2x4x?x8xf32>, tensor<4x20x8xf32>)
      outs(%0, %1, %2, %3, %4, %5 : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>,
           tensor<2x?x20xf32>, tensor<2x?x6xf32>, tensor<2x4x?x8xf32>,
           tensor<4x20x8xf32>) {sigma = 1.5 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>, tensor<2x?x20xf32>,
         tensor<2x?x6xf32>, tensor<2x4x?x8xf32>, tensor<4x20x8xf32>
  return %r#0, %r#1, %r#2, %r#3, %r#4, %r#5 : tensor<2x4x?x8xf32>,
      tensor<2x4x?x8xf32>, tensor<2x?x20xf32>, tensor<2x?x6xf32>,
      tensor<2x4x?x8xf32>, tensor<4x20x8xf32>
}
)mlir");
  int64_t n = 53;
  std::vector<Tensor> operands = {
      torch::randn({2, 4, n, 8}), torch::randn({2, 4, n, 8}),
      torch::randn({2, n, 20}),   torch::softmax(torch::randn({2, n, 6}), -1),
      torch::randn({2, 4, n, 8}), torch::randn({4, 20, 8}) * 0.3,
  };
  std::vector<Tensor> wide;
  for (const Tensor &operand : operands)
    wide.push_back(leaf(operand));
  const Tensor &q = wide[0], &k = wide[1], &u = wide[2], &e = wide[3],
               &v = wide[4], &wo = wide[5];
  Tensor dp = torch::randn({2, n, 6});

  // p_i = sum_h H'_ih sum_j A'_h,ij e_j (13), with a uniform prior of the
  // heads.
  constexpr double precision = 1 / (1.5 * 1.5);
  Tensor prior = (q.matmul(k.transpose(2, 3)) / std::sqrt(8.0))
                     .masked_fill(~causalMask(n), -INFINITY);
  Tensor means = torch::einsum("hdc,bhjc->bhjd", {wo, v});
  Tensor product = torch::einsum("bid,bhjd->bhij", {u, means});
  Tensor half = means.square().sum(-1).unsqueeze(2) / 2;
  Tensor joint = prior + precision * (product - half);
  Tensor priorLse = torch::logsumexp(prior, -1);
  Tensor jointLse = torch::logsumexp(joint, -1);
  Tensor heads = torch::softmax(jointLse - priorLse, 1).unsqueeze(-1);
  Tensor p = (heads * torch::softmax(joint, -1).matmul(e.unsqueeze(1))).sum(1);
  p.backward(dp.to(kF64));

  std::vector<Tensor> arguments(operands.begin(), operands.begin() + 4);
  for (const Tensor &saved : {p, priorLse, jointLse})
    arguments.push_back(saved.detach().to(kF32).contiguous());
  arguments.push_back(dp);
  arguments.insert(arguments.end(), operands.begin() + 4, operands.end());
  std::vector<Tensor> gradients;
  for (const Tensor &operand : operands)
    gradients.push_back(torch::empty_like(operand));
  arguments.insert(arguments.end(), gradients.begin(), gradients.end());
  gradient(arguments);
  double maxLogit =
      prior.masked_fill(~causalMask(n), 0.0).abs().max().item<double>() +
      precision *
          (product.abs().max().item<double>() + half.max().item<double>());
  const char *names[] = {"dq", "dk", "du", "de", "dv", "dwo"};
  for (size_t i = 0; i < operands.size(); ++i)
    reportGradient(std::string("attention_posterior_backward ") + names[i],
                   gradients[i], wide[i].grad(), probTolerance(maxLogit));
}

//===----------------------------------------------------------------------===//
// mad_dispersion
//===----------------------------------------------------------------------===//

void testMadDispersion() {
  const char *source = R"mlir(
func.func @disperse(%h: tensor<?x37xf32>, %assign: tensor<?xi32>)
    -> (tensor<5x37xf32>, tensor<5x37xf32>, tensor<5xi32>) {
  %s0 = tensor.empty() : tensor<5x37xf32>
  %m0 = tensor.empty() : tensor<5x37xf32>
  %c0 = tensor.empty() : tensor<5xi32>
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x37xf32>, tensor<?xi32>)
      outs(%s0, %m0, %c0 : tensor<5x37xf32>, tensor<5x37xf32>, tensor<5xi32>)
      -> tensor<5x37xf32>, tensor<5x37xf32>, tensor<5xi32>
  return %r#0, %r#1, %r#2 : tensor<5x37xf32>, tensor<5x37xf32>, tensor<5xi32>
}
)mlir";
  // A common offset of 100 exposes one-pass formulas. Cluster 4 stays empty.
  Tensor h = torch::randn({701, 37}) + 100.0;
  Tensor assign = torch::randint(-1, 4, {701}).to(kI32);
  Tensor s = torch::empty({5, 37}), mean = torch::empty({5, 37});
  Tensor count = torch::empty({5}, kI32);
  CompiledFunction disperse(source);
  disperse({h, assign, s, mean, count});

  double rounding = 0x1p-22 * h.abs().max().item<double>();
  double error = 0;
  bool counts = true;
  for (int64_t e = 0; e < 5; ++e) {
    Tensor rows = h.to(kF64).index({assign == e});
    counts &= count[e].item<int64_t>() == rows.size(0);
    Tensor centre = rows.size(0) ? rows.mean(0) : torch::zeros({37}, kF64);
    Tensor spread =
        rows.size(0) ? (rows - centre).abs().mean(0) : torch::zeros({37}, kF64);
    Tensor slack = 1e-5 * spread + rounding;
    error = std::max(
        error, ((s[e].to(kF64) - spread).abs() / slack).max().item<double>());
  }
  reportExact("mad_dispersion count", counts);
  report("mad_dispersion s, in tolerances", error, 1.0);
}

//===----------------------------------------------------------------------===//
// adjacency_update
//===----------------------------------------------------------------------===//

void testAdjacencyUpdate() {
  const char *source = R"mlir(
func.func @update(%a: tensor<9x9xf32>, %indices: tensor<?x3xi32>)
    -> tensor<9x9xf32> {
  %0 = tensor.empty() : tensor<9x9xf32>
  %new = moe.adjacency_update ins(%a, %indices : tensor<9x9xf32>, tensor<?x3xi32>)
      outs(%0 : tensor<9x9xf32>) {beta = 0.75 : f64} -> tensor<9x9xf32>
  return %new : tensor<9x9xf32>
}
)mlir";
  Tensor a = torch::rand({9, 9});
  // Expert 8 is never selected: its row decays (E16).
  Tensor indices = torch::rand({203, 8})
                       .argsort(/*dim=*/int64_t{-1}, /*descending=*/false)
                       .index({Slice(), Slice(0, 3)})
                       .to(kI32)
                       .contiguous();
  Tensor updated = torch::empty({9, 9});
  CompiledFunction update(source);
  update({a, indices, updated});

  Tensor selected = torch::zeros({203, 9}, kF64);
  selected.scatter_(1, indices.to(torch::kInt64), 1.0);
  Tensor counts = selected.t().matmul(selected);
  Tensor rows = counts.sum(1, /*keepdim=*/true);
  Tensor normed = torch::where(rows > 0, counts / rows.clamp_min(1), 0.0);
  report("adjacency_update a_new",
         maxError(updated, 0.75 * a.to(kF64) + 0.25 * normed), 1e-6);
}
} // namespace

int main(int argc, char **argv) {
  const std::map<std::string, std::function<void()>> tests = {
      {"adjacency_gate_backward", testAdjacencyGateBackward},
      {"adjacency_update", testAdjacencyUpdate},
      {"attention_posterior", testAttentionPosterior},
      {"attention_posterior_backward", testAttentionPosteriorBackward},
      {"mad_dispersion", testMadDispersion},
      {"similarity_inform", testSimilarityInform},
      {"similarity_inform_backward", testSimilarityInformBackward},
      {"topk_renorm", testTopKRenorm},
      {"topk_renorm_backward", testTopKRenormBackward},
  };
  if (argc != 2 || !tests.count(argv[1])) {
    std::fprintf(stderr, "usage: moe-reference-test OP, OP one of");
    for (const auto &test : tests)
      std::fprintf(stderr, " %s", test.first.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  torch::manual_seed(0);
  try {
    tests.at(argv[1])();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return allPassed ? 0 : 1;
}
