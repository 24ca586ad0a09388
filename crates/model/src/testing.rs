//! For tests that need the real default model. The one place where such a test may skip.

use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Model, ModelName, ModelSource, NoProgress, ResolveOptions, resolve};

static NUM_SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// The default model's file, fetched on first use; `None` means that the calling test, named `test`, must return.
///
/// A skip is never silent: the reason and the number of skips so far go to standard error past the test harness's
/// capture. With `CI=true` in the environment there is no skip.
///
/// # Panics
/// With `CI=true`, when the model can't be had.
pub fn model_path_or_skip(test: &str) -> Option<PathBuf> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found =
        FOUND.get_or_init(|| match resolve(&ModelName::Default, &ResolveOptions::from_env(&NoProgress)) {
            Ok(ModelSource::File(path)) => Ok(path),
            Ok(_) => Err("the default model is not a file".to_owned()),
            Err(error) => Err(error.to_string()),
        });
    match found {
        Ok(path) => Some(path.clone()),
        Err(reason) => {
            let in_ci = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!in_ci, "{test} needs the default model: {reason}");
            let num_skipped = NUM_SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
            // Written directly, since the harness hides what a passing test prints.
            let line =
                format!("SKIPPED {test} (skip {num_skipped} of this run): no default model: {reason}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            None
        }
    }
}

/// The opened default model; `None` as in [`model_path_or_skip`].
///
/// # Panics
/// With `CI=true`, when the model can't be had; always, when it is there and can't be opened.
pub fn model_or_skip(test: &str) -> Option<Model> {
    let path = model_path_or_skip(test)?;
    match Model::open(&ModelSource::File(path)) {
        Ok(model) => Some(model),
        Err(error) => panic!("the default model does not open: {error}"),
    }
}
