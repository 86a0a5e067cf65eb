#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "optim/step.h"

namespace ktft {
namespace {

constexpr int64_t kTask = 32768;  // elements of a task

template <class T>
double squares(const T* at, int64_t count) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {}, total = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; lane++) {
      const double v = load(at[i + lane]);
      sums[lane] += v * v;
    }
  for (; i < count; i++) total += double(load(at[i])) * load(at[i]);
  for (const double sum : sums) total += sum;
  return total;
}

template <class Word>
int64_t bits(const void* data, int64_t begin, int64_t count) {
  const Word* const at = static_cast<const Word*>(data) + begin;
  uint64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += at[i];
  return int64_t(total);
}

// Divides rows into parts and calls `work(tensor, first element, elements, row among all tensors' rows, number of the
// part)` for each, on all threads. Before that, it calls `count(parts, rows)`.
template <class Count, class Work>
void by_parts(Runtime& runtime, const std::vector<RowTensor>& tensors, const Count& count, const Work& work) {
  struct Parts {
    int64_t first_part, first_row, of_row;
  };
  std::vector<Parts> starts;
  int64_t parts = 0, rows = 0;
  for (const RowTensor& tensor : tensors) {
    KTFT_CHECK(tensor.dtype != Dtype::kF16, "norms are of fp32 and bf16 tensors, not fp16");
    starts.push_back({.first_part = parts, .first_row = rows, .of_row = (tensor.cols + kTask - 1) / kTask});
    parts += tensor.rows * starts.back().of_row;
    rows += tensor.rows;
  }
  KTFT_CHECK(parts <= INT32_MAX, "gradients of at most ", int64_t(INT32_MAX) * kTask, " elements can be looked at");
  count(parts, rows);
  if (parts == 0) return;
  const ForkLock lock(runtime.mutex);
  runtime.pool.run(int(parts), [&](int part, int) {
    // The last tensor that begins at or before this part; tensors without elements have no parts
    const auto after = std::upper_bound(starts.begin(), starts.end(), int64_t(part),
                                        [](int64_t at, const Parts& start) { return at < start.first_part; });
    const Parts& start = *(after - 1);
    const RowTensor& tensor = tensors[size_t(after - 1 - starts.begin())];
    const int64_t row = (part - start.first_part) / start.of_row, at = (part - start.first_part) % start.of_row * kTask;
    work(tensor, row * tensor.cols + at, std::min(kTask, tensor.cols - at), start.first_row + row, part);
  });
}

// Returns for each row the sum of what `work(tensor, first element, elements)` returns for its parts.
template <class Sum, class Work>
std::vector<Sum> by_rows(Runtime& runtime, const std::vector<RowTensor>& tensors, const Work& work) {
  std::vector<Sum> sums, totals;
  std::vector<int64_t> row_of;
  by_parts(
      runtime, tensors,
      [&](int64_t parts, int64_t rows) {
        sums.resize(size_t(parts));
        row_of.resize(size_t(parts));
        totals.resize(size_t(rows));
      },
      [&](const RowTensor& tensor, int64_t begin, int64_t count, int64_t row, int part) {
        row_of[size_t(part)] = row;
        sums[size_t(part)] = work(tensor, begin, count);
      });
  for (size_t part = 0; part < sums.size(); part++) totals[size_t(row_of[part])] += sums[part];
  return totals;
}

}  // namespace

void row_norms(Runtime& runtime, const std::vector<RowTensor>& tensors, float* norms) {
  const auto totals = by_rows<double>(runtime, tensors, [](const RowTensor& tensor, int64_t begin, int64_t count) {
    return tensor.dtype == Dtype::kF32 ? squares(static_cast<const float*>(tensor.data) + begin, count)
                                       : squares(static_cast<const bf16*>(tensor.data) + begin, count);
  });
  for (const double total : totals) *norms++ = float(std::sqrt(total));
}

std::vector<int64_t> row_bits(Runtime& runtime, const std::vector<RowTensor>& tensors) {
  return by_rows<int64_t>(runtime, tensors, [](const RowTensor& tensor, int64_t begin, int64_t count) {
    return tensor.dtype == Dtype::kF32 ? bits<uint32_t>(tensor.data, begin, count)
                                       : bits<uint16_t>(tensor.data, begin, count);
  });
}

void scale(Runtime& runtime, const std::vector<RowTensor>& tensors, float factor) {
  by_parts(
      runtime, tensors, [](int64_t, int64_t) {},
      [&](const RowTensor& tensor, int64_t begin, int64_t count, int64_t, int) {
        if (tensor.dtype == Dtype::kF32)
          multiply(static_cast<float*>(tensor.data) + begin, static_cast<float*>(tensor.data) + begin, count, factor);
        else
          multiply(static_cast<bf16*>(tensor.data) + begin, static_cast<bf16*>(tensor.data) + begin, count, factor);
      });
}

}  // namespace ktft
