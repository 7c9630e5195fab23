#include "server/service_context.h"

#include "server/wire_conversion.h"
#include "tests/server/running_server.h"

namespace kvtrie {
namespace {

TEST(GeometryCacheTest, KnowsRegisteredModelsOnly) {
  RunningServer server;
  GeometryCache geometries(server.server().engine());
  EXPECT_TRUE(absl::IsNotFound(geometries.Get(ModelId{}).status()));
  const auto model = IdFromProto<ModelId>(server.RegisterModel());
  for (int i = 0; i < 2; ++i) {
    const auto geometry = geometries.Get(model);
    ASSERT_TRUE(geometry.ok());
    EXPECT_EQ((*geometry)->layer_count(), 2u);
    EXPECT_EQ((*geometry)->raw_block_bytes(), kTestBlockBytes);
  }
}

}  // namespace
}  // namespace kvtrie
