//! From names to files, without a network.

mod support;

use baton_model::{HubOptions, ModelError, ModelName, ModelSource, NoProgress, ResolveOptions, resolve};
use support::Gguf;

fn offline(cache: &std::path::Path) -> ResolveOptions<'static> {
    ResolveOptions {
        cache_dir: cache.to_owned(),
        progress: &NoProgress,
        offline: true,
        hub: HubOptions { endpoint: "http://127.0.0.1:9".to_owned(), token: None },
    }
}

#[test]
fn a_path_is_a_file_or_a_folder_with_one() {
    let folder = tempfile::tempdir().unwrap();
    let options = offline(folder.path());
    let named = |path: &std::path::Path| resolve(&ModelName::Path(path.to_owned()), &options);
    assert!(matches!(named(&folder.path().join("none.gguf")), Err(ModelError::NotFound { .. })));
    assert!(matches!(named(folder.path()), Err(ModelError::NotFound { .. })));
    let path = Gguf::llama().write(folder.path());
    assert_eq!(named(&path).unwrap(), ModelSource::File(path.clone()));
    assert_eq!(named(folder.path()).unwrap(), ModelSource::File(path));
    std::fs::write(folder.path().join("second.GGUF"), "").unwrap();
    let Err(ModelError::Ambiguous { files, .. }) = named(folder.path()) else { panic!("picked one of two") };
    assert_eq!(files, ["model.gguf", "second.GGUF"]);
}

#[test]
fn a_folder_with_safetensors_is_that_model() {
    let temporary = tempfile::tempdir().unwrap();
    let options = offline(temporary.path());
    let path = temporary.path().join("model");
    std::fs::create_dir(&path).unwrap();
    let resolved = || resolve(&ModelName::Path(path.clone()), &options);
    let touch = |name: &str| std::fs::write(path.join(name), "").unwrap();
    let missing = |name: &str| match resolved() {
        Err(ModelError::NotFound { path: missing }) => assert_eq!(missing, path.join(name)),
        other => panic!("{other:?}"),
    };
    missing("*.gguf");
    touch("config.json");
    missing("model.safetensors");
    touch("model.safetensors.index.json");
    assert_eq!(resolved().unwrap(), ModelSource::Folder(path.clone()));
    std::fs::remove_file(path.join("model.safetensors.index.json")).unwrap();
    touch("model.safetensors");
    assert_eq!(resolved().unwrap(), ModelSource::Folder(path.clone()));
    // Both kinds in one folder: a GGUF file can be named, the other can't.
    Gguf::llama().write(&path);
    assert_eq!(resolved().unwrap(), ModelSource::Folder(path.clone()));
    let file = path.join("model.gguf");
    assert_eq!(resolve(&ModelName::Path(file.clone()), &options).unwrap(), ModelSource::File(file));
    std::fs::remove_file(path.join("config.json")).unwrap();
    assert_eq!(resolved().unwrap(), ModelSource::File(path.join("model.gguf")));
    std::fs::remove_file(path.join("model.gguf")).unwrap();
    missing("config.json");
    let error = resolve(&ModelName::Path(path.join("model.safetensors")), &options).unwrap_err();
    assert!(error.to_string().contains("named by its folder"), "{error}");
}

#[test]
fn offline_names_what_is_missing_and_where() {
    let folder = tempfile::tempdir().unwrap();
    let options = offline(folder.path());
    for name in ["default", "org/name", "org/name:model.gguf"] {
        let error = resolve(&name.parse().unwrap(), &options).unwrap_err();
        assert!(matches!(error, ModelError::Offline { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(&*folder.path().to_string_lossy()), "{text}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "offline leaves the cache as it was");
}

#[test]
fn the_tiny_model_needs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let options = offline(&folder.path().join("not made"));
    assert_eq!(resolve(&ModelName::Tiny, &options).unwrap(), ModelSource::Tiny);
}

#[test]
fn a_file_of_the_right_size_and_wrong_content_is_not_the_default_model() {
    let folder = tempfile::tempdir().unwrap();
    let options = offline(folder.path());
    let path = folder.path().join(baton_model::DEFAULT_MODEL_FILE);
    std::fs::File::create(&path).unwrap().set_len(baton_model::DEFAULT_MODEL_BYTES).unwrap();
    assert!(matches!(resolve(&ModelName::Default, &options), Err(ModelError::Offline { .. })));
}
