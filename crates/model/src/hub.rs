//! Model hubs that speak the Hugging Face protocol: which file of a repository, and where it lies in the cache.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use ureq::Agent;

use crate::cache::CacheLock;
use crate::download::{Fetch, client, get_document};
use crate::name::is_repo_file;
use crate::{ModelError, ResolveOptions};

/// The list of a repository's files is small; more than this is not such a list.
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// Beside a repository's files: the name of the only GGUF file it had when it was listed.
const ONLY_FILE: &str = "only-gguf";

/// Which hub, and who asks.
#[derive(Clone)]
pub struct HubOptions {
    /// Base address, without a trailing slash.
    pub endpoint: String,
    /// Access token, sent to the endpoint's host only.
    pub token: Option<String>,
}

impl HubOptions {
    /// `$HF_ENDPOINT` (else `https://huggingface.co`) and `$HF_TOKEN`.
    pub fn from_env() -> HubOptions {
        let set = |name| {
            std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        HubOptions { endpoint: endpoint.trim_end_matches('/').to_owned(), token: set("HF_TOKEN") }
    }
}

/// The token stays out of logs.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "(set)");
        f.debug_struct("HubOptions").field("endpoint", &self.endpoint).field("token", &token).finish()
    }
}

/// `GET {endpoint}/api/models/{repo}?blobs=true`, as far as it matters here.
#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

/// Large files are stored by content; the listing gives their checksum.
#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

pub(crate) fn resolve(
    repo: &str,
    file: Option<&str>,
    options: &ResolveOptions<'_>,
) -> Result<PathBuf, ModelError> {
    let folder = options.cache_dir.join("hub").join(repo);
    if let Some(path) = cached(&folder, file) {
        return Ok(path);
    }
    if options.offline {
        let name = file.map_or_else(|| repo.to_owned(), |file| format!("{repo}:{file}"));
        return Err(ModelError::Offline { name, cache_dir: options.cache_dir.clone() });
    }
    let agent = client();
    let siblings = list(&agent, repo, options)?;
    let sibling = pick(repo, file, &siblings)?;
    let target = folder.join(&sibling.rfilename);
    let _lock = CacheLock::take(&target, options.progress)?;
    // Another process may have fetched it while this one waited for the lock.
    if !target.is_file() {
        fetch(&agent, repo, sibling, &target, options)?;
    }
    if file.is_none() {
        let record = folder.join(ONLY_FILE);
        std::fs::write(&record, &sibling.rfilename).map_err(ModelError::io("write", &record))?;
    }
    Ok(target)
}

fn cached(folder: &Path, file: Option<&str>) -> Option<PathBuf> {
    let path = match file {
        Some(file) => folder.join(file),
        None => {
            let name = std::fs::read_to_string(folder.join(ONLY_FILE)).ok()?;
            is_repo_file(&name).then(|| folder.join(&name))?
        }
    };
    path.is_file().then_some(path)
}

fn list(agent: &Agent, repo: &str, options: &ResolveOptions<'_>) -> Result<Vec<Sibling>, ModelError> {
    let url = format!("{}/api/models/{repo}?blobs=true", options.hub.endpoint);
    let document = get_document(agent, &url, options.hub.token.as_deref(), MAX_LISTING_BYTES)?;
    let listing: Listing = serde_json::from_slice(&document)
        .map_err(|error| ModelError::download(&url, format!("the answer is no list of files: {error}")))?;
    Ok(listing.siblings.into_iter().filter(|sibling| is_repo_file(&sibling.rfilename)).collect())
}

fn pick<'a>(repo: &str, file: Option<&str>, siblings: &'a [Sibling]) -> Result<&'a Sibling, ModelError> {
    let names = || siblings.iter().map(|sibling| sibling.rfilename.clone()).collect::<Vec<_>>();
    match (file, siblings) {
        (_, []) => Err(ModelError::InvalidName {
            name: repo.to_owned(),
            reason: "the repository holds no GGUF file".to_owned(),
        }),
        (Some(file), _) => {
            siblings.iter().find(|sibling| sibling.rfilename == file).ok_or_else(|| ModelError::InvalidName {
                name: format!("{repo}:{file}"),
                reason: format!("the repository has no such file; it has {}", names().join(", ")),
            })
        }
        (None, [only]) => Ok(only),
        (None, _) => Err(ModelError::Ambiguous { what: repo.to_owned(), files: names() }),
    }
}

fn fetch(
    agent: &Agent,
    repo: &str,
    sibling: &Sibling,
    target: &Path,
    options: &ResolveOptions<'_>,
) -> Result<(), ModelError> {
    let lfs = sibling.lfs.as_ref();
    let sha256 = lfs.and_then(|lfs| lfs.sha256.as_ref()).map(|sha256| sha256.to_ascii_lowercase());
    let url = format!("{}/{repo}/resolve/main/{}", options.hub.endpoint, sibling.rfilename);
    Fetch {
        agent,
        url: &url,
        token: options.hub.token.as_deref(),
        target,
        bytes: lfs.and_then(|lfs| lfs.size).or(sibling.size),
        sha256: sha256.as_deref(),
        progress: options.progress,
    }
    .run()
}
