#include "moe/workspace.h"

namespace ktft {

Workspace& workspace_of(Runtime& runtime) {
  if (!runtime.workspace) runtime.workspace = std::make_shared<Workspace>(runtime.pool.nodes(), runtime.pool.threads());
  return *runtime.workspace;
}

size_t workspace_bytes(const Runtime& runtime) {
  size_t total = 0;
  const auto add = [&](const auto& buffer) { total += buffer.bytes(); };
  for (const Scratch& scratch : runtime.scratch) add(scratch);
  if (!runtime.workspace) return total;
  runtime.workspace->each(add);
  for (const Scratch& memory : runtime.workspace->expert_memory) add(memory);
  return total;
}

}  // namespace ktft
