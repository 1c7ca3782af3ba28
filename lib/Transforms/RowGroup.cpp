//===- RowGroup.cpp - Ops that one loop over rows computes ----------------===//

#include "RowGroup.h"

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Support/ElementBytes.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "llvm/ADT/SmallBitVector.h"
#include "llvm/ADT/SmallVectorExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Rows of one op
//===----------------------------------------------------------------------===//

/// Whether `dim`, the innermost of the results, is what tells the rows of a
/// batched product apart: of the inputs with the most dims, two or more, some
/// lack it, while all of them have the dims `rows`. The log-sum-exps `[b, h,
/// i]` of attention, `q[b, h, i, f]` against `k[b, h, j, f]`, are such rows
/// along `i`; the logits `[n, e]` or `[b, n, e]` of a router are not rows along
/// `e`, because its weights lack `n`.
static bool isRowOfBatchedProduct(TilingInterface op, unsigned dim,
                                  ArrayRef<unsigned> rows) {
  auto maps = cast<IndexingMapOpInterface>(op.getOperation());
  auto dps = cast<DestinationStyleOpInterface>(op.getOperation());
  unsigned mostDims = 0;
  SmallVector<AffineMap> inputs;
  for (OpOperand *input : dps.getDpsInputOperands()) {
    AffineMap map = maps.getMatchingIndexingMap(input);
    if (map.getNumResults() > mostDims)
      inputs.clear();
    mostDims = std::max(mostDims, map.getNumResults());
    if (map.getNumResults() == mostDims)
      inputs.push_back(map);
  }
  auto lacks = [](AffineMap map, unsigned dim) {
    return !map.isFunctionOfDim(dim);
  };
  return !rows.empty() && inputs.size() > 1 &&
         llvm::is_contained(op.getLoopIteratorTypes(),
                            utils::IteratorType::reduction) &&
         llvm::any_of(inputs, [&](AffineMap map) { return lacks(map, dim); }) &&
         llvm::none_of(inputs, [&](AffineMap map) {
           return llvm::any_of(rows,
                               [&](unsigned row) { return lacks(map, row); });
         });
}

/// The dims of a grid of GPU blocks.
static constexpr size_t kMaxGridDims = 3;

bool mlir::moe::hasEmptyOperand(Operation *op) {
  return llvm::any_of(op->getOperandTypes(), [](Type type) {
    auto shaped = dyn_cast<ShapedType>(type);
    return shaped && shaped.hasRank() &&
           llvm::is_contained(shaped.getShape(), 0);
  });
}

/// The dims along which the rows of `op` lie, those of size 1 among them.
static Rows getAllRowDims(TilingInterface op) {
  auto maps = dyn_cast<IndexingMapOpInterface>(op.getOperation());
  auto dps = dyn_cast<DestinationStyleOpInterface>(op.getOperation());
  if (!maps || !dps || dps.getNumDpsInits() == 0 || hasEmptyOperand(op) ||
      isLoopOfKernel(op))
    return {};
  SmallVector<utils::IteratorType> iterators = op.getLoopIteratorTypes();
  SmallVector<unsigned> spans(iterators.size(), 0), innermost(spans);
  for (OpOperand &init : dps.getDpsInitsMutable()) {
    AffineMap map = maps.getMatchingIndexingMap(&init);
    for (AffineExpr expr : map.getResults())
      if (auto dim = dyn_cast<AffineDimExpr>(expr))
        ++spans[dim.getPosition()];
    if (map.getNumResults() > 1)
      if (auto dim = dyn_cast<AffineDimExpr>(map.getResults().back()))
        ++innermost[dim.getPosition()];
  }
  unsigned numInits = dps.getNumDpsInits();
  bool mayCutInnermost = hasOwnLoop(op);
  Rows rows;
  std::optional<unsigned> last;
  for (auto [dim, iterator] : llvm::enumerate(iterators)) {
    if (iterator != utils::IteratorType::parallel || spans[dim] != numInits)
      continue;
    if (innermost[dim] < numInits || mayCutInnermost)
      rows.push_back(dim);
    else
      last = dim;
  }
  if (last && isRowOfBatchedProduct(op, *last, rows))
    rows.push_back(*last);
  return rows;
}

/// Whether a result of `op` has the size 1 along `dim`.
static bool isUnitDim(TilingInterface op, unsigned dim) {
  auto maps = cast<IndexingMapOpInterface>(op.getOperation());
  auto dps = cast<DestinationStyleOpInterface>(op.getOperation());
  for (OpOperand &init : dps.getDpsInitsMutable()) {
    std::optional<unsigned> position =
        maps.getMatchingIndexingMap(&init).getResultPosition(
            getAffineDimExpr(dim, op.getContext()));
    if (position &&
        cast<ShapedType>(init.get().getType()).getDimSize(*position) == 1)
      return true;
  }
  return false;
}

bool mlir::moe::hasEffectsInBody(Operation *op) {
  for (Region &region : op->getRegions())
    for (Operation &nested : region.getOps())
      if (!isMemoryEffectFree(&nested))
        return true;
  return false;
}

Rows mlir::moe::getRowDims(TilingInterface op) {
  Rows rows = getAllRowDims(op);
  bool hasGrid = isForGPU(op), isTooDeep = rows.size() > kMaxGridDims;
  if (!hasGrid && hasEffectsInBody(op))
    return {};
  if (!hasGrid || isTooDeep) {
    Rows longRows = llvm::filter_to_vector(
        rows, [&](unsigned dim) { return !isUnitDim(op, dim); });
    if (!longRows.empty())
      rows = longRows;
  }
  // What a grid has no dim for stays whole.
  if (hasGrid && rows.size() > kMaxGridDims)
    rows.erase(rows.begin(), rows.end() - kMaxGridDims);
  return rows;
}

std::optional<WantedTile> mlir::moe::getWantedTile(TilingInterface op,
                                                   ArrayRef<unsigned> rows) {
  KernelConfigAttr config = getKernelConfig(op);
  Rows all = getAllRowDims(op);
  if (!config || config.getRows() == 0 || all.empty())
    return std::nullopt;
  const unsigned *dim = llvm::find(rows, all.back());
  if (dim == rows.end())
    return std::nullopt;
  return WantedTile{static_cast<unsigned>(dim - rows.begin()),
                    config.getRows()};
}

bool mlir::moe::hasBoundedTile(Operation *op, ArrayRef<unsigned> rows) {
  auto maps = cast<IndexingMapOpInterface>(op);
  for (OpOperand &init :
       cast<DestinationStyleOpInterface>(op).getDpsInitsMutable()) {
    auto type = cast<ShapedType>(init.get().getType());
    AffineMap map = maps.getMatchingIndexingMap(&init);
    for (auto [position, expr] : llvm::enumerate(map.getResults())) {
      auto dim = dyn_cast<AffineDimExpr>(expr);
      bool isCut = dim && llvm::is_contained(rows, dim.getPosition());
      if (!isCut && type.isDynamicDim(position))
        return false;
    }
  }
  return true;
}

/// The dims of the producer of `use` whose rows the user needs along its dims
/// `userRows`; failure where it needs others, or all of them.
static FailureOr<Rows> getProducerRows(OpOperand &use,
                                       ArrayRef<unsigned> userRows) {
  auto result = cast<OpResult>(use.get());
  Operation *producer = result.getOwner();
  AffineMap read =
      cast<IndexingMapOpInterface>(use.getOwner()).getMatchingIndexingMap(&use);
  OpOperand *init =
      cast<DestinationStyleOpInterface>(producer).getTiedOpOperand(result);
  AffineMap write =
      cast<IndexingMapOpInterface>(producer).getMatchingIndexingMap(init);
  SmallVector<utils::IteratorType> iterators =
      cast<TilingInterface>(producer).getLoopIteratorTypes();
  Rows rows;
  for (unsigned dim : userRows) {
    std::optional<unsigned> position =
        read.getResultPosition(getAffineDimExpr(dim, read.getContext()));
    if (!position)
      return failure();
    auto expr = dyn_cast<AffineDimExpr>(write.getResult(*position));
    if (!expr || iterators[expr.getPosition()] != utils::IteratorType::parallel)
      return failure();
    rows.push_back(expr.getPosition());
  }
  return rows;
}

//===----------------------------------------------------------------------===//
// Growing
//===----------------------------------------------------------------------===//

RowGroup::RowGroup(TilingInterface seed,
                   function_ref<bool(Operation *)> isTaken)
    : needsBoundedTiles(isForGPU(seed)), isTaken(isTaken) {
  rows[seed] = getRowDims(seed);
  for (bool grew = !rows[seed].empty(); grew;) {
    grew = false;
    for (Operation *member : getMembers())
      grew |= addProducers(member) || (isOfRouting() && addConsumers(member));
  }
}

/// Whether `op` says enough of itself to be computed row by row.
bool RowGroup::isCandidate(Operation *op) const {
  return isa<TilingInterface>(op) && isa<IndexingMapOpInterface>(op) &&
         isa<DestinationStyleOpInterface>(op) &&
         op->getBlock() == rows.front().first->getBlock() && !isTaken(op) &&
         !hasOwnLoop(op) && !isLoopOfKernel(op);
}

bool RowGroup::isOfRouting() const {
  return llvm::any_of(rows, [](const auto &member) {
    return isa<MoEStructuredOpInterface>(member.first);
  });
}

bool RowGroup::addProducers(Operation *member) {
  bool added = false;
  for (Value operand : member->getOperands()) {
    Operation *producer = operand.getDefiningOp();
    if (producer && !contains(producer) && isCandidate(producer))
      added |= addProducer(producer);
  }
  return added;
}

bool RowGroup::miss(Operation *producer, StringRef reason) {
  missed[producer] = reason.str();
  return false;
}

/// Whether `op` is elementwise and has few of its `rows` for each of those that
/// loops cut: the streams of a layer whose weighted sum is taken.
static bool areFew(Operation *op, ArrayRef<unsigned> rows,
                   ArrayRef<unsigned> cut) {
  constexpr int64_t kFewRows = 8;
  auto elementwise = dyn_cast<linalg::LinalgOp>(op);
  if (!elementwise || elementwise.getNumReductionLoops() > 0)
    return false;
  SmallVector<int64_t> sizes = elementwise.getStaticLoopRanges();
  int64_t number = 1;
  for (unsigned dim : rows) {
    if (llvm::is_contained(cut, dim))
      continue;
    if (ShapedType::isDynamic(sizes[dim]) || sizes[dim] > kFewRows / number)
      return false;
    number *= sizes[dim];
  }
  return true;
}

bool RowGroup::addProducer(Operation *producer) {
  std::optional<Rows> producerRows;
  SetVector<Operation *> others;
  for (OpOperand &use : producer->getUses()) {
    Operation *user = use.getOwner();
    // The size of a result is known without computing it.
    if (isa<tensor::DimOp>(user))
      continue;
    // A body may read any element.
    Operation *reader = producer->getBlock()->findAncestorOpInBlock(*user);
    if (reader != user && contains(reader))
      return miss(producer, "several tiles need the same rows of it");
    if (!contains(user)) {
      others.insert(user);
      continue;
    }
    FailureOr<Rows> needed = getProducerRows(use, getRows(user));
    if (failed(needed) || (producerRows && *producerRows != *needed))
      return miss(producer, "several tiles need the same rows of it");
    producerRows = *needed;
  }
  // A mean over rows would otherwise compute all rows that it spans in one
  // tile.
  Rows all = getRowDims(cast<TilingInterface>(producer));
  if (all.size() > getNumLoops() &&
      (needsBoundedTiles || !areFew(producer, all, *producerRows)))
    return miss(producer, "it has more rows to run in parallel");
  if (needsBoundedTiles && !hasBoundedTile(producer, *producerRows))
    return miss(producer, "a tile of it has no bounded size");
  if (others.empty()) {
    rows[producer] = *producerRows;
    missed.erase(producer);
    return true;
  }
  // Between the kernels of a GPU, what one of them computes is stored anyway.
  // What has effects would have them in each of its copies.
  bool mayStore = isa<MoEStructuredOpInterface>(producer) ||
                  (needsBoundedTiles && !hasEffectsInBody(producer));
  if (!isOfRouting() && !mayStore)
    return miss(producer, "its result has several users");

  Members joining;
  joining[producer] = *producerRows;
  for (Operation *user : others) {
    Members withUser = joining;
    if (absorb(user, withUser)) {
      joining = std::move(withUser);
      continue;
    }
    // This user reads what the loop stores, which only results may be whose
    // rows are rows of the loop.
    if (!mayStore ||
        getRowDims(cast<TilingInterface>(producer)) != *producerRows)
      return miss(producer, "its result has several users");
  }
  if (!staysConvexWith(joining))
    return miss(producer, "what is computed from it outside of the loop is "
                          "needed inside");
  join(joining);
  return true;
}

void RowGroup::join(const Members &joining) {
  for (auto &[op, opRows] : joining) {
    rows[op] = opRows;
    missed.erase(op);
  }
}

/// The rows of `user` if it works on the rows of its producers in the group and
/// `joining` one by one, as the group's loops run over them.
FailureOr<Rows> RowGroup::getConsumerRows(Operation *user,
                                          const Members &joining) const {
  if (!isCandidate(user))
    return failure();
  Rows userRows = getRowDims(cast<TilingInterface>(user));
  if (userRows.size() != getNumLoops())
    return failure();
  for (OpOperand &use : user->getOpOperands()) {
    Operation *source = use.get().getDefiningOp();
    const Rows *computed = nullptr;
    if (auto member = rows.find(source); member != rows.end())
      computed = &member->second;
    else if (auto other = joining.find(source); other != joining.end())
      computed = &other->second;
    if (!computed)
      continue;
    FailureOr<Rows> needed = getProducerRows(use, userRows);
    if (failed(needed) || *needed != *computed)
      return failure();
  }
  return userRows;
}

/// Adds `user` to `joining` if it is an op of the dialect over the same rows,
/// or all that is computed from it ends in such ops.
bool RowGroup::absorb(Operation *user, Members &joining) const {
  if (contains(user) || joining.contains(user))
    return true;
  FailureOr<Rows> userRows = getConsumerRows(user, joining);
  if (failed(userRows))
    return false;
  joining[user] = *userRows;
  if (isa<MoEStructuredOpInterface>(user))
    return true;
  bool hasUser = false;
  for (OpOperand &use : user->getUses()) {
    Operation *next = use.getOwner();
    if (isa<tensor::DimOp>(next))
      continue;
    hasUser = true;
    if (!absorb(next, joining))
      return false;
    // A user that was in before reads what it now shares a loop with.
    auto member = rows.find(next);
    ArrayRef<unsigned> nextRows =
        member != rows.end() ? member->second : joining.find(next)->second;
    FailureOr<Rows> needed = getProducerRows(use, nextRows);
    if (failed(needed) || *needed != *userRows)
      return false;
  }
  return hasUser;
}

bool RowGroup::addConsumers(Operation *member) {
  bool added = false;
  for (Operation *user : llvm::to_vector(member->getUsers())) {
    if (contains(user) || !isa<MoEStructuredOpInterface>(user))
      continue;
    Members joining;
    if (!absorb(user, joining) || !staysConvexWith(joining))
      continue;
    join(joining);
    added = true;
  }
  return added;
}

/// Whether no value that leaves the group and `joining` comes back into them.
bool RowGroup::staysConvexWith(const Members &joining) const {
  Block *block = rows.front().first->getBlock();
  auto isInside = [&](Operation *op) {
    return contains(op) || joining.contains(op);
  };
  SmallVector<Operation *> worklist =
      llvm::to_vector(llvm::make_first_range(rows));
  llvm::append_range(worklist, llvm::make_first_range(joining));
  DenseSet<Operation *> outside;
  while (!worklist.empty()) {
    Operation *op = worklist.pop_back_val();
    bool isLeaving = isInside(op);
    for (Operation *user : op->getUsers()) {
      user = block->findAncestorOpInBlock(*user);
      if (!user || isa<tensor::DimOp>(user))
        continue;
      if (isInside(user)) {
        if (!isLeaving)
          return false;
        continue;
      }
      if (outside.insert(user).second)
        worklist.push_back(user);
    }
  }
  return true;
}

//===----------------------------------------------------------------------===//
// Reading
//===----------------------------------------------------------------------===//

unsigned RowGroup::getSharingLoop() const {
  for (const auto &[op, opRows] : rows) {
    auto product = dyn_cast<linalg::LinalgOp>(op);
    if (!product || product.getNumReductionLoops() == 0 ||
        product.getNumDpsInputs() != 2)
      continue;
    for (unsigned loop = opRows.size(); loop-- > 0;)
      for (OpOperand *input : product.getDpsInputOperands())
        if (!product.getMatchingIndexingMap(input).isFunctionOfDim(
                opRows[loop]))
          return loop;
  }
  return getNumLoops() - 1;
}

SmallVector<Operation *> RowGroup::getMembers() const {
  SmallVector<Operation *> members =
      llvm::to_vector(llvm::make_first_range(rows));
  llvm::sort(members,
             [](Operation *a, Operation *b) { return a->isBeforeInBlock(b); });
  return members;
}

SmallVector<TilingInterface> RowGroup::getRoots() const {
  SmallVector<TilingInterface> roots;
  for (Operation *member : getMembers()) {
    bool isUsedInside = false, isUsedOutside = false;
    for (Operation *user : member->getUsers())
      if (!isa<tensor::DimOp>(user))
        (contains(user) ? isUsedInside : isUsedOutside) = true;
    if (isUsedOutside || !isUsedInside)
      roots.push_back(cast<TilingInterface>(member));
  }
  return roots;
}

/// The elements of one row of `result`, which lies along the dims `rows`; 0
/// where that is not known.
static int64_t getElementsARow(OpResult result, ArrayRef<unsigned> rows) {
  auto type = cast<ShapedType>(result.getType());
  auto dps = cast<DestinationStyleOpInterface>(result.getOwner());
  int64_t elements = 1;
  AffineMap map = cast<IndexingMapOpInterface>(result.getOwner())
                      .getMatchingIndexingMap(dps.getTiedOpOperand(result));
  for (auto [position, expr] : llvm::enumerate(map.getResults())) {
    auto dim = dyn_cast<AffineDimExpr>(expr);
    if (!dim || !llvm::is_contained(rows, dim.getPosition()))
      elements *= type.isDynamicDim(position) ? 0 : type.getDimSize(position);
  }
  return elements;
}

static int64_t getBytesARow(OpResult result, ArrayRef<unsigned> rows) {
  Type element = getElementTypeOrSelf(result.getType());
  return element.isIntOrIndexOrFloat()
             ? getElementBytes(element) * getElementsARow(result, rows)
             : 0;
}

int64_t RowGroup::getMostElementsARow() const {
  int64_t most = 0;
  for (auto &[op, opRows] : rows)
    for (OpResult result : op->getResults())
      most = std::max(most, getElementsARow(result, opRows));
  return most;
}

int64_t RowGroup::getBytesARow() const {
  int64_t bytes = 0;
  for (auto &[op, opRows] : rows)
    for (OpResult result : op->getResults()) {
      auto isStoring = [&](Operation *user) {
        return !contains(user) && !isa<tensor::DimOp>(user);
      };
      auto isFusedInto = [&](Operation *user) {
        return isa<linalg::LinalgOp>(op) && isa<linalg::LinalgOp>(user) &&
               cast<linalg::LinalgOp>(op).getNumReductionLoops() == 0;
      };
      if (llvm::any_of(result.getUsers(), isStoring) ||
          (result.hasOneUse() && isFusedInto(*result.user_begin())))
        continue;
      // An op that has no kernel hands on as much between its parts.
      bool hasParts = isa<MoEStructuredOpInterface>(op) &&
                      !getKernelConfig(op) && !result.use_empty();
      bytes += (hasParts ? 2 : 1) * ::getBytesARow(result, opRows);
    }
  return bytes;
}
