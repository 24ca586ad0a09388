//! What a user types to name a model.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::ModelError;

/// A model's name before anything was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelName {
    /// `default`: the model this release was tested with, checked by SHA-256.
    Default,
    /// `builtin:tiny`: a small deterministic model made in memory.
    Tiny,
    /// A GGUF file, or a folder that holds a safetensors model (`config.json` and `model.safetensors` or its shards),
    /// or else exactly one GGUF file.
    Path(PathBuf),
    /// A repository on a model hub: `org/name`, or `org/name:file.gguf`. Fetched once; a newer revision is fetched only
    /// after the files were removed from the cache folder.
    Hub {
        /// `org/name`.
        repo: String,
        /// The GGUF file within the repository. When absent, the repository's safetensors model is meant if it
        /// holds one, else its only GGUF file.
        file: Option<String>,
    },
}

const ACCEPTED: &str = "expected 'default', 'builtin:tiny', a path to a GGUF file or a model folder, or a hub id like org/name or org/name:file.gguf";

impl FromStr for ModelName {
    type Err = ModelError;

    /// Reads a name. What looks like a path (starts with `/`, `./`, `../` or `~`, or ends in `.gguf` without naming a
    /// repository) or exists as one is a path; `a/b` and `a/b:file` are hub ids.
    fn from_str(text: &str) -> Result<ModelName, ModelError> {
        let invalid =
            |reason: &str| ModelError::InvalidName { name: text.to_owned(), reason: reason.to_owned() };
        match text {
            "" => return Err(invalid(ACCEPTED)),
            "default" => return Ok(ModelName::Default),
            "builtin:tiny" => return Ok(ModelName::Tiny),
            _ => {}
        }
        if text.starts_with("builtin:") {
            return Err(invalid("the only built-in model is builtin:tiny"));
        }
        let marked =
            ["/", "./", "../", "~"].iter().any(|mark| text.starts_with(mark)) || text == "." || text == "..";
        if marked || Path::new(text).exists() {
            return Ok(ModelName::Path(expand_home(text)));
        }
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        // "models/x.gguf" is a path that does not exist yet; "org/name:x.gguf" names its repository.
        if file.is_none() && text.to_ascii_lowercase().ends_with(".gguf") {
            return Ok(ModelName::Path(PathBuf::from(text)));
        }
        if !is_repo(repo) {
            return Err(invalid(ACCEPTED));
        }
        if let Some(file) = file
            && !is_repo_file(file)
        {
            return Err(invalid(
                "the part after ':' must be a GGUF file of the repository, such as model.Q4_0.gguf",
            ));
        }
        Ok(ModelName::Hub { repo: repo.to_owned(), file: file.map(str::to_owned) })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelName::Default => f.write_str("default"),
            ModelName::Tiny => f.write_str("builtin:tiny"),
            ModelName::Path(path) => write!(f, "{}", path.display()),
            ModelName::Hub { repo, file: None } => f.write_str(repo),
            ModelName::Hub { repo, file: Some(file) } => write!(f, "{repo}:{file}"),
        }
    }
}

fn expand_home(text: &str) -> PathBuf {
    let rest = text.strip_prefix("~/").or(if text == "~" { Some("") } else { None });
    match (rest, std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(text),
    }
}

/// One segment of a hub path: hub names hold letters, digits, `.`, `_` and `-`. `.` and `..` would walk out of the
/// cache folder.
pub(crate) fn is_segment(segment: &str) -> bool {
    !segment.is_empty()
        && segment.len() <= 200
        && segment.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
        && segment.chars().any(|c| c != '.')
}

fn is_repo(repo: &str) -> bool {
    matches!(repo.split_once('/'), Some((org, name)) if is_segment(org) && is_segment(name))
}

/// Whether `file` can stand in a hub URL and below the cache folder: relative, of plain segments, ending in `.gguf`.
pub(crate) fn is_repo_file(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf") && file.split('/').all(is_segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(repo: &str, file: Option<&str>) -> ModelName {
        ModelName::Hub { repo: repo.to_owned(), file: file.map(str::to_owned) }
    }

    #[test]
    fn each_kind_of_name_is_recognised() {
        for (text, name) in [
            ("default", ModelName::Default),
            ("builtin:tiny", ModelName::Tiny),
            ("/models/a.gguf", ModelName::Path("/models/a.gguf".into())),
            ("./org/name", ModelName::Path("./org/name".into())),
            ("../name", ModelName::Path("../name".into())),
            ("models/a.gguf", ModelName::Path("models/a.gguf".into())),
            ("a.GGUF", ModelName::Path("a.GGUF".into())),
            ("org/name", hub("org/name", None)),
            ("Org-1/na.me_2:x/y.Q4_0.gguf", hub("Org-1/na.me_2", Some("x/y.Q4_0.gguf"))),
        ] {
            assert_eq!(text.parse::<ModelName>().unwrap(), name, "{text}");
            assert_eq!(name.to_string().parse::<ModelName>().unwrap(), name, "{text} does not round-trip");
        }
    }

    #[test]
    fn an_existing_relative_path_wins_over_a_hub_id() {
        // The crate's own folder is where its tests run.
        assert_eq!("src/lib.rs".parse::<ModelName>().unwrap(), ModelName::Path("src/lib.rs".into()));
    }

    #[test]
    fn a_tilde_means_the_home_folder() {
        let home = std::env::home_dir().unwrap();
        assert_eq!("~/m.gguf".parse::<ModelName>().unwrap(), ModelName::Path(home.join("m.gguf")));
    }

    #[test]
    fn nonsense_is_refused_with_what_is_accepted() {
        for text in [
            "",
            "tiny",
            "builtin:huge",
            "a/b/c",
            "a b/c",
            "org/",
            "/org:x".trim_start_matches('/'),
            "org/..",
            "org/name:",
            "org/name:../../x.gguf",
            "org/name:weights.bin",
            "org/name:/etc/x.gguf",
            "org/name:a//b.gguf",
        ] {
            let error = text.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
