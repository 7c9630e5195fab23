#include "storage/engine/text_reuse.h"

#include "gtest/gtest.h"
#include "tests/storage/engine/engine_fixture.h"

namespace kvtrie {
namespace {

TEST(TextReusePolicyTest, NobodyMayUnlessSomebodySaysSo) {
  ModelSpec spec = TestModelSpec();
  spec.dtype = DType::kBfloat16;
  const ModelId model = spec.Digest();
  const TenantId tenant{3};
  EXPECT_EQ(TextReusePolicy().Forbids(tenant, model, spec), TextReuseForbidden::kServer);
  TextReusePolicy some{.tenants = {TenantId{2}}};
  EXPECT_EQ(some.Forbids(tenant, model, spec), TextReuseForbidden::kTenant);
  some.tenants.push_back(tenant);
  EXPECT_EQ(some.Forbids(tenant, model, spec), std::nullopt);
  TextReusePolicy all{.all_tenants = true};
  EXPECT_EQ(all.Forbids(tenant, model, spec), std::nullopt);
  all.forbidden_models = {ModelId{}, model};
  EXPECT_EQ(all.Forbids(tenant, model, spec), TextReuseForbidden::kModel);
  spec.rope.scaling = "yarn";
  all.forbidden_models.clear();
  EXPECT_EQ(all.Forbids(tenant, model, spec), TextReuseForbidden::kPositions);
}

}  // namespace
}  // namespace kvtrie
