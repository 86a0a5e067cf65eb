#include "cuda/rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>

namespace ktft {

std::vector<Piece> pieces(const std::vector<int>& rows, const std::vector<RowCopy>& matrices) {
  std::vector<Piece> found;
  for (const RowCopy& m : matrices) {
    const bool dense = m.bytes == m.all_stride && m.bytes == m.chosen_stride;
    for (size_t i = 0; i < rows.size(); i++) {
      if (i > 0 && dense && rows[i] == rows[i - 1] + 1) {
        found.back().bytes += m.bytes;
        continue;
      }
      found.push_back({m.all + size_t(rows[i]) * m.all_stride, m.chosen + i * m.chosen_stride, m.bytes});
    }
  }
  return found;
}

void copy_on_host(const std::vector<int>& rows, const std::vector<RowCopy>& matrices, bool gather, int threads) {
  constexpr size_t kBlock = size_t(4) << 20;  // the least that is worth a thread
  std::vector<Piece> blocks;
  for (const Piece& p : pieces(rows, matrices))
    for (size_t at = 0; at < p.bytes; at += kBlock)
      blocks.push_back({p.all + at, p.chosen + at, std::min(kBlock, p.bytes - at)});
  size_t total = 0;
  for (const Piece& b : blocks) total += b.bytes;
  const size_t count = std::clamp<size_t>(total / kBlock, 1, size_t(std::max(threads, 1)));
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks.size();) {
      const Piece& b = blocks[i];
      std::memcpy(reinterpret_cast<void*>(gather ? b.chosen : b.all),
                  reinterpret_cast<const void*>(gather ? b.all : b.chosen), b.bytes);
    }
  };
  std::vector<std::thread> others;
  others.reserve(count);
  try {
    while (others.size() + 1 < count) others.emplace_back(work);
  } catch (const std::exception&) {  // the threads that did start copy its share
  }
  work();
  for (std::thread& t : others) t.join();
}

}  // namespace ktft
