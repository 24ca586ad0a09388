//! Fetching from a hub, played by a server on this machine.

mod support {
    pub(crate) mod http;
}

use std::path::Path;
use std::sync::Mutex;

use baton_model::{HubOptions, ModelError, ModelSource, NoProgress, Progress, ResolveOptions, resolve};
use sha2::{Digest, Sha256};
use support::http::{Reply, Request, Server};

const FILE: &str = "/org/name/resolve/main/model.gguf";

fn content() -> Vec<u8> {
    (0..300_000u32).map(|index| (index % 251) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn listing(files: &[&str]) -> Reply {
    let siblings: Vec<String> = files.iter().map(|file| format!(r#"{{"rfilename":"{file}"}}"#)).collect();
    Reply::new(200, format!(r#"{{"siblings":[{}]}}"#, siblings.join(",")))
}

/// A listing with size and checksum, as hubs give for large files.
fn exact_listing(size: usize, sha256: &str) -> Reply {
    Reply::new(
        200,
        format!(
            r#"{{"siblings":[{{"rfilename":"README.md"}},
            {{"rfilename":"model.gguf","size":{size},"lfs":{{"sha256":"{sha256}","size":{size}}}}}]}}"#
        ),
    )
}

/// Serves `bytes` with ranges, honouring `If-Range`.
fn ranged(request: &Request, bytes: &[u8], etag: &str) -> Reply {
    let fresh = request.header("if-range").is_none_or(|tag| tag == etag);
    match request.range_start() {
        Some(start) if start >= bytes.len() => Reply::new(416, ""),
        Some(start) if fresh => Reply::new(206, &bytes[start..])
            .with("etag", etag)
            .with("content-range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len())),
        _ => Reply::new(200, bytes).with("etag", etag),
    }
}

fn fetch_with(
    server: &Server,
    cache: &Path,
    name: &str,
    progress: &dyn Progress,
) -> Result<ModelSource, ModelError> {
    let hub = HubOptions { endpoint: server.endpoint.clone(), token: Some("secret".to_owned()) };
    let options = ResolveOptions { cache_dir: cache.to_owned(), progress, offline: false, hub };
    resolve(&name.parse()?, &options)
}

fn fetch(server: &Server, cache: &Path, name: &str) -> Result<ModelSource, ModelError> {
    fetch_with(server, cache, name, &NoProgress)
}

fn bytes_of(source: ModelSource) -> Vec<u8> {
    let ModelSource::File(path) = source else { panic!("not a file") };
    let folder = path.parent().unwrap();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(!name.contains(".part"), "{name} is left behind");
    }
    std::fs::read(path).unwrap()
}

#[test]
fn the_only_file_is_found_fetched_and_kept() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| {
        if request.path.starts_with("/api/") {
            exact_listing(content().len(), &sha256(&content()))
        } else {
            ranged(request, &content(), "\"v1\"")
        }
    });
    for _ in 0..2 {
        assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
        assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name:model.gguf").unwrap()), content());
    }
    assert_eq!(server.seen("/api/models/org/name?blobs=true").len(), 1, "cached models need no server");
    assert_eq!(server.seen(FILE).len(), 1);
    assert_eq!(
        server.seen("").iter().filter(|r| r.header("authorization") == Some("Bearer secret")).count(),
        2
    );
}

#[test]
fn a_broken_connection_is_resumed_where_it_broke() {
    #[derive(Default)]
    struct Log(Mutex<Vec<u64>>);
    impl Progress for Log {
        fn start(&self, what: &str, total_bytes: Option<u64>) {
            assert_eq!((what, total_bytes), ("model.gguf", Some(300_000)));
        }
        fn advance_to(&self, done_bytes: u64) {
            self.0.lock().unwrap().push(done_bytes);
        }
        fn note(&self, _line: &str) {}
        fn finish(&self) {}
    }
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, nth| match (request.path.starts_with("/api/"), nth) {
        (true, _) => exact_listing(content().len(), &sha256(&content())),
        (false, 0) => ranged(request, &content(), "\"v1\"").cut(100_000),
        (false, 1) => ranged(request, &content(), "\"v1\"").cut(50_000),
        (false, _) => ranged(request, &content(), "\"v1\""),
    });
    let log = Log::default();
    assert_eq!(bytes_of(fetch_with(&server, cache.path(), "org/name", &log).unwrap()), content());
    let starts: Vec<_> = server.seen(FILE).iter().map(Request::range_start).collect();
    assert_eq!(starts, [None, Some(100_000), Some(150_000)]);
    assert_eq!(server.seen(FILE)[1].header("if-range"), Some("\"v1\""));
    let seen = log.0.into_inner().unwrap();
    assert!(seen.is_sorted(), "progress went back: {seen:?}");
    assert_eq!(seen.last(), Some(&300_000));
}

#[test]
fn a_later_process_resumes_what_an_earlier_one_left() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("hub/org/name");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("model.gguf.part"), &content()[..200_000]).unwrap();
    std::fs::write(folder.join("model.gguf.part.etag"), "\"v1\"").unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => ranged(request, &content(), "\"v1\""),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
    assert_eq!(server.seen(FILE)[0].range_start(), Some(200_000));
}

#[test]
fn a_changed_file_is_fetched_anew_not_stitched() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("hub/org/name");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("model.gguf.part"), vec![7; 200_000]).unwrap();
    std::fs::write(folder.join("model.gguf.part.etag"), "\"v0\"").unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => ranged(request, &content(), "\"v1\""),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
    assert_eq!(server.seen(FILE).len(), 1);
}

#[test]
fn a_server_without_ranges_restarts_cleanly() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, nth| match (request.path.starts_with("/api/"), nth) {
        (true, _) => listing(&["model.gguf"]),
        (false, 0) => Reply::new(200, content()).with("etag", "\"v1\"").cut(100_000),
        (false, _) => Reply::new(200, content()).with("etag", "\"v1\""),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
    assert_eq!(server.seen(FILE).len(), 2);
}

#[test]
fn without_tag_and_checksum_nothing_is_resumed() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, nth| match (request.path.starts_with("/api/"), nth) {
        (true, _) => listing(&["model.gguf"]),
        (false, 0) => Reply::new(200, content()).cut(100_000),
        (false, _) => Reply::new(200, content()),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
    assert_eq!(server.seen(FILE)[1].range_start(), None);
}

#[test]
fn a_body_that_stays_short_is_given_up_and_never_becomes_a_model() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => Reply::new(200, content()).cut(0),
    });
    let error = fetch(&server, cache.path(), "org/name").unwrap_err();
    assert!(matches!(error, ModelError::Download { .. }), "{error:?}");
    assert_eq!(server.seen(FILE).len(), 5, "attempts are bounded");
    assert!(!cache.path().join("hub/org/name/model.gguf").exists());
}

#[test]
fn wrong_bytes_are_discarded() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => exact_listing(content().len(), &sha256(b"something else")),
        false => ranged(request, &content(), "\"v1\""),
    });
    let error = fetch(&server, cache.path(), "org/name").unwrap_err();
    assert!(matches!(&error, ModelError::Corrupt { .. }), "{error:?}");
    let folder = cache.path().join("hub/org/name");
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["model.gguf.lock"]);
}

#[test]
fn a_size_other_than_promised_is_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => exact_listing(299_999, &sha256(&content())),
        false => ranged(request, &content(), "\"v1\""),
    });
    let text = fetch(&server, cache.path(), "org/name").unwrap_err().to_string();
    assert!(text.contains("offers 300000 bytes, expected 299999"), "{text}");
}

#[test]
fn a_body_whose_end_can_not_be_seen_is_refused() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => Reply { unsized_body: true, ..Reply::new(200, content()) },
    });
    let text = fetch(&server, cache.path(), "org/name").unwrap_err().to_string();
    assert!(text.contains("does not say how large"), "{text}");
}

#[test]
fn several_files_are_listed_for_the_user_to_pick() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["a.Q4_0.gguf", "b.Q8_0.gguf", "../../evil.gguf", "notes.txt"]),
        false => Reply::new(200, content()),
    });
    let Err(ModelError::Ambiguous { files, .. }) = fetch(&server, cache.path(), "org/name") else {
        panic!("picked one")
    };
    assert_eq!(files, ["a.Q4_0.gguf", "b.Q8_0.gguf"]);
    let text = fetch(&server, cache.path(), "org/name:c.gguf").unwrap_err().to_string();
    assert!(text.contains("a.Q4_0.gguf, b.Q8_0.gguf"), "{text}");
    fetch(&server, cache.path(), "org/name:b.Q8_0.gguf").unwrap();
    // A file fetched by name does not settle what the bare repository means.
    assert!(matches!(fetch(&server, cache.path(), "org/name"), Err(ModelError::Ambiguous { .. })));
}

#[test]
fn refusals_say_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.as_str() {
        path if path.contains("gone") => Reply::new(404, ""),
        path if path.contains("gated") => Reply::new(403, ""),
        path if path.contains("nothing") => listing(&["README.md"]),
        path if path.contains("garbage") => Reply::new(200, "<html>"),
        _ => Reply::new(418, ""),
    });
    let error = fetch(&server, cache.path(), "org/gone").unwrap_err();
    assert!(matches!(error, ModelError::NotFound { .. }), "{error:?}");
    for (name, part) in [
        ("org/gated", "HF_TOKEN"),
        ("org/nothing", "no GGUF file"),
        ("org/garbage", "no list of files"),
        ("org/odd", "418"),
    ] {
        let text = fetch(&server, cache.path(), name).unwrap_err().to_string();
        assert!(text.contains(part) && !text.contains("secret"), "{text}");
    }
    assert_eq!(server.seen("gated").len(), 1, "a refusal is not retried");
}

#[test]
fn a_busy_server_is_asked_again() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, nth| match (request.path.starts_with("/api/"), nth) {
        (_, 0) => Reply::new(503, ""),
        (true, _) => listing(&["model.gguf"]),
        (false, _) => ranged(request, &content(), "\"v1\""),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
}

#[test]
fn the_token_stays_with_its_host() {
    let cache = tempfile::tempdir().unwrap();
    let storage = Server::start(|request, _| ranged(request, &content(), "\"v1\""));
    // Another name for the same machine is another host.
    let elsewhere = storage.endpoint.replace("127.0.0.1", "localhost");
    let server = Server::start(move |request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => Reply::new(302, "").with("location", format!("{elsewhere}/blob")),
    });
    assert_eq!(bytes_of(fetch(&server, cache.path(), "org/name").unwrap()), content());
    assert_eq!(server.seen(FILE)[0].header("authorization"), Some("Bearer secret"));
    assert_eq!(storage.seen("/blob")[0].header("authorization"), None);
}

#[test]
fn many_at_once_fetch_once() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|request, _| match request.path.starts_with("/api/") {
        true => listing(&["model.gguf"]),
        false => {
            std::thread::sleep(std::time::Duration::from_millis(100));
            ranged(request, &content(), "\"v1\"")
        }
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| fetch(&server, cache.path(), "org/name").unwrap());
        }
    });
    assert_eq!(server.seen(FILE).len(), 1);
}

/// A repository of a sharded model, with a GGUF file and others beside it.
fn folder_server() -> Server {
    Server::start(|request, _| match request.path.as_str() {
        path if path.starts_with("/api/") => listing(&[
            "README.md",
            "config.json",
            "tokenizer.json",
            "pytorch_model.bin",
            "model.gguf",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]),
        path if path.ends_with("index.json") => Reply::new(
            200,
            r#"{"weight_map":{"a":"model-00002-of-00002.safetensors","b":"model-00001-of-00002.safetensors"}}"#,
        ),
        path => Reply::new(200, path.as_bytes()),
    })
}

#[test]
fn a_repository_with_safetensors_is_fetched_as_a_folder() {
    let cache = tempfile::tempdir().unwrap();
    let server = folder_server();
    let folder = cache.path().join("hub/org/name");
    for _ in 0..2 {
        assert_eq!(fetch(&server, cache.path(), "org/name").unwrap(), ModelSource::Folder(folder.clone()));
    }
    assert_eq!(server.seen("/api/").len(), 1, "cached models need no server");
    for name in [
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ] {
        assert_eq!(
            std::fs::read_to_string(folder.join(name)).unwrap(),
            format!("/org/name/resolve/main/{name}")
        );
    }
    for name in ["README.md", "pytorch_model.bin", "model.gguf"] {
        assert!(!folder.join(name).exists(), "{name} is not part of the model");
    }
    // A GGUF file of it can still be named.
    let named = fetch(&server, cache.path(), "org/name:model.gguf").unwrap();
    assert_eq!(named, ModelSource::File(folder.join("model.gguf")));
    // A file that went missing is fetched again, the others are not.
    std::fs::remove_file(folder.join("model-00001-of-00002.safetensors")).unwrap();
    assert_eq!(fetch(&server, cache.path(), "org/name").unwrap(), ModelSource::Folder(folder.clone()));
    assert_eq!(server.seen("/org/name/resolve/main/model-00001").len(), 2);
    assert_eq!(server.seen("/org/name/resolve/main/model-00002").len(), 1);
}

#[test]
fn an_index_can_not_reach_out_of_its_repository() {
    for shard in ["../../evil.safetensors", "/etc/x.safetensors", "absent.safetensors", "model.bin"] {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start(move |request, _| match request.path.as_str() {
            path if path.starts_with("/api/") => listing(&[
                "config.json",
                "model.safetensors.index.json",
                "../../evil.safetensors",
                "model.bin",
            ]),
            path if path.ends_with("index.json") => {
                Reply::new(200, format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#))
            }
            _ => Reply::new(200, "x"),
        });
        let error = fetch(&server, cache.path(), "org/name").unwrap_err();
        assert!(error.to_string().contains(shard), "{error}");
        assert!(server.seen("evil").is_empty() && server.seen("model.bin").is_empty());
    }
}
