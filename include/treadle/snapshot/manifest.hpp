// SPDX-License-Identifier: Apache-2.0
// What a snapshot says of itself. It is written last: a folder without a manifest that is right is no snapshot.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/metrics.hpp"
#include "treadle/snapshot/checksum.hpp"
#include "treadle/snapshot/input_file.hpp"
#include "treadle/snapshot/json.hpp"
#include "treadle/snapshot/values.hpp"
#include "treadle/version.hpp"

namespace treadle {
inline namespace v0_1 {

/// The content of a snapshot's `manifest.json`.
struct SnapshotManifest {
  struct File {
    std::int64_t bytes = 0;
    std::uint64_t checksum = 0;  ///< XXH3-64 of its bytes
  };

  std::string run{};                              ///< of all snapshots of a run, resumed ones included
  std::int64_t step = 0;                          ///< steps made in the run, skipped ones included
  std::int64_t world_size = 1;                    ///< ranks
  bool exact = true;                              ///< whether going on from it is bitwise going on without it
  std::string device{};                           ///< "cpu", "cuda"
  std::string treadle_version{};                  ///< that wrote it
  std::string torch_version{};                    ///< likewise
  std::map<std::string, std::string> policies{};  ///< by axis, and the rule, with their options: for people
  std::map<std::string, std::string> types{};     ///< by axis, and the rule
  Metrics metrics{};                              ///< of the last epoch that was complete
  std::map<std::string, File> files{};            ///< by name
};

namespace detail {

inline constexpr const char* manifest_name = "manifest.json";

/// The text of a manifest: its content, and that content's checksum.
inline std::string manifest_text(const SnapshotManifest& manifest) {
  auto files = nlohmann::json::object();
  for (const auto& [name, file] : manifest.files)
    files[name] = {{"bytes", file.bytes}, {"xxh3", checksum_text(file.checksum)}};
  const nlohmann::json content{{"format", "treadle-snapshot"},
                               {"format_version", 1},
                               {"run", manifest.run},
                               {"step", manifest.step},
                               {"world_size", manifest.world_size},
                               {"exact", manifest.exact},
                               {"device", manifest.device},
                               {"treadle_version", manifest.treadle_version},
                               {"torch_version", manifest.torch_version},
                               {"policies", manifest.policies},
                               {"types", manifest.types},
                               {"metrics", to_json(manifest.metrics)},
                               {"files", files}};
  return dump_json({{"content", content}, {"xxh3", checksum_text(checksum(dump_json(content, manifest_name)))}},
                   manifest_name);
}

/// Throws `SnapshotError` for what `manifest_text` has not written.
inline SnapshotManifest parse_manifest(std::string_view text, const std::string& source) {
  const auto json = parse_json(text, source);
  const auto refuse = [&](const std::string& why) {
    throw SnapshotError("'" + source + "' " + why + "; take an earlier snapshot.");
  };
  if (!json.is_object() || !json.contains("content") || !json["content"].is_object() || !json.contains("xxh3"))
    refuse("is no manifest of a snapshot");
  const auto& content = json["content"];
  if (!content.contains("format") || content["format"] != "treadle-snapshot") refuse("is no manifest of a snapshot");
  if (json["xxh3"] != checksum_text(checksum(dump_json(content, source))))
    refuse("is damaged: its checksum is another than that of its content");
  if (!content.contains("format_version") || content["format_version"] != 1)
    refuse("is of a format that this version of Treadle does not read");
  SnapshotManifest manifest;
  const ValueReader read(content, source);
  read("run", manifest.run);
  read("step", manifest.step);
  read("world_size", manifest.world_size);
  read("exact", manifest.exact);
  read("device", manifest.device);
  read("treadle_version", manifest.treadle_version);
  read("torch_version", manifest.torch_version);
  read("metrics", manifest.metrics);
  for (const auto& [key, texts] : {std::pair{"policies", &manifest.policies}, {"types", &manifest.types}}) {
    if (!content.contains(key) || !content[key].is_object()) refuse("has no " + std::string(key));
    for (const auto& [name, value] : content[key].items())
      if (!from_json(value, (*texts)[name])) refuse("names no type of '" + name + "'");
  }
  if (!content.contains("files") || !content["files"].is_object()) refuse("lists no files");
  for (const auto& [name, value] : content["files"].items()) {
    std::string sum;
    auto& file = manifest.files[name];
    // A name with a slash could lead out of the folder.
    const bool plain = !name.empty() && name[0] != '.' && name.find('/') == std::string::npos;
    const bool whole = plain && value.is_object() && value.contains("bytes") && value.contains("xxh3") &&
                       from_json(value["bytes"], file.bytes) && from_json(value["xxh3"], sum);
    const auto number = checksum_from(sum);
    if (!whole || !number) refuse("lists a file " + shown(name) + " that cannot be");
    file.checksum = *number;
  }
  return manifest;
}

}  // namespace detail

/// The manifest of the snapshot in `folder`. Throws `SnapshotError` if it is missing, damaged or foreign.
inline SnapshotManifest read_manifest(const std::filesystem::path& folder) {
  const auto path = folder / detail::manifest_name;
  return detail::parse_manifest(detail::read_file(path, 16 << 20), path.string());
}

/// Reads every file of the snapshot in `folder` and compares it with the manifest, which is returned. Throws
/// `SnapshotError` naming the first file that is missing, cut or changed.
inline SnapshotManifest verify_snapshot(const std::filesystem::path& folder) {
  auto manifest = read_manifest(folder);
  for (const auto& [name, file] : manifest.files) {
    const detail::InputFile input(folder / name);
    const std::string path = (folder / name).string();
    if (input.size() != file.bytes)
      throw SnapshotError("'" + path + "' holds " + std::to_string(input.size()) + " bytes, and the manifest says " +
                          std::to_string(file.bytes) + "; take an earlier snapshot.");
    if (input.checksum() != file.checksum)
      throw SnapshotError("'" + path +
                          "' is damaged: its checksum is another than the manifest says; take an earlier snapshot.");
  }
  return manifest;
}

}  // namespace v0_1
}  // namespace treadle
