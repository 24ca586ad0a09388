//! Model hubs that speak the Hugging Face protocol: which files of a repository, and where they lie in the cache.
//!
//! A repository that holds a safetensors model stands for that; else its only GGUF file is meant. A GGUF file that is
//! named is that file.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use ureq::Agent;

use crate::cache::CacheLock;
use crate::download::{Fetch, client, get_document};
use crate::folder::{DOCUMENTS, INDEX_FILE, WEIGHTS_FILE};
use crate::name::{is_repo_file, is_segment};
use crate::{ModelError, ModelSource, ResolveOptions, checkpoint, folder};

/// The list of a repository's files is small; more than this is not such a list.
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// Beside a repository's files: the name of the only GGUF file it had when it was listed.
const ONLY_FILE: &str = "only-gguf";
/// Beside a safetensors model's files: their names, a line each, written when all of them are here.
const FOLDER_FILES: &str = "safetensors-files";

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
) -> Result<ModelSource, ModelError> {
    let folder = options.cache_dir.join("hub").join(repo);
    if let Some(source) = cached(&folder, file) {
        return Ok(source);
    }
    if options.offline {
        let name = file.map_or_else(|| repo.to_owned(), |file| format!("{repo}:{file}"));
        return Err(ModelError::Offline { name, cache_dir: options.cache_dir.clone() });
    }
    let agent = client();
    let siblings = list(&agent, repo, options)?;
    let hub = Repository { agent, repo, siblings, folder, options };
    if file.is_none() && folder::is_model(|name| hub.sibling(name).is_some()) {
        return hub.fetch_folder();
    }
    hub.fetch_gguf(file)
}

fn cached(folder: &Path, file: Option<&str>) -> Option<ModelSource> {
    let recorded = |record: &str| std::fs::read_to_string(folder.join(record)).ok();
    let here = |name: &str| folder.join(name).is_file();
    if let Some(file) = file {
        return here(file).then(|| ModelSource::File(folder.join(file)));
    }
    if let Some(names) = recorded(FOLDER_FILES)
        && names.lines().all(|name| is_segment(name) && here(name))
    {
        return Some(ModelSource::Folder(folder.to_owned()));
    }
    let name = recorded(ONLY_FILE)?;
    (is_repo_file(&name) && here(&name)).then(|| ModelSource::File(folder.join(&name)))
}

fn list(agent: &Agent, repo: &str, options: &ResolveOptions<'_>) -> Result<Vec<Sibling>, ModelError> {
    let url = format!("{}/api/models/{repo}?blobs=true", options.hub.endpoint);
    let document = get_document(agent, &url, options.hub.token.as_deref(), MAX_LISTING_BYTES)?;
    let listing: Listing = serde_json::from_slice(&document)
        .map_err(|error| ModelError::download(&url, format!("the answer is no list of files: {error}")))?;
    Ok(listing.siblings)
}

/// A repository as it was listed, and where its files go.
struct Repository<'a> {
    agent: Agent,
    repo: &'a str,
    siblings: Vec<Sibling>,
    folder: PathBuf,
    options: &'a ResolveOptions<'a>,
}

impl Repository<'_> {
    fn sibling(&self, name: &str) -> Option<&Sibling> {
        self.siblings.iter().find(|sibling| sibling.rfilename == name)
    }

    fn record(&self, name: &str, content: &str) -> Result<(), ModelError> {
        let record = self.folder.join(name);
        std::fs::write(&record, content).map_err(ModelError::io("write", &record))
    }

    fn fetch_gguf(&self, file: Option<&str>) -> Result<ModelSource, ModelError> {
        let sibling = self.pick(file)?;
        let target = self.folder.join(&sibling.rfilename);
        let _lock = CacheLock::take(&target, self.options.progress)?;
        self.fetch(sibling)?;
        if file.is_none() {
            self.record(ONLY_FILE, &sibling.rfilename)?;
        }
        Ok(ModelSource::File(target))
    }

    fn pick(&self, file: Option<&str>) -> Result<&Sibling, ModelError> {
        let files: Vec<&Sibling> =
            self.siblings.iter().filter(|sibling| is_repo_file(&sibling.rfilename)).collect();
        let names = || files.iter().map(|sibling| sibling.rfilename.clone()).collect::<Vec<_>>();
        match (file, files.as_slice()) {
            (_, []) => Err(ModelError::InvalidName {
                name: self.repo.to_owned(),
                reason: "the repository holds no GGUF file and no config.json with model.safetensors"
                    .to_owned(),
            }),
            (Some(file), _) => {
                let found = files.iter().find(|sibling| sibling.rfilename == file);
                found.copied().ok_or_else(|| ModelError::InvalidName {
                    name: format!("{}:{file}", self.repo),
                    reason: format!("the repository has no such file; it has {}", names().join(", ")),
                })
            }
            (None, [only]) => Ok(only),
            (None, _) => Err(ModelError::Ambiguous { what: self.repo.to_owned(), files: names() }),
        }
    }

    /// Fetches the documents, then the weights: the single file, or those that the index names.
    fn fetch_folder(&self) -> Result<ModelSource, ModelError> {
        let _lock = CacheLock::take(&self.folder.join(FOLDER_FILES), self.options.progress)?;
        let mut names: Vec<String> = DOCUMENTS.iter().map(|(name, _)| (*name).to_owned()).collect();
        names.retain(|name| self.sibling(name).is_some());
        for name in &names {
            self.fetch_named(name)?;
        }
        let weights = if self.sibling(WEIGHTS_FILE).is_some() {
            vec![WEIGHTS_FILE.to_owned()]
        } else {
            self.fetch_named(INDEX_FILE)?;
            names.push(INDEX_FILE.to_owned());
            checkpoint::shard_names(&self.folder.join(INDEX_FILE))?
        };
        for name in &weights {
            self.fetch_named(name)?;
        }
        names.extend(weights);
        self.record(FOLDER_FILES, &names.join("\n"))?;
        Ok(ModelSource::Folder(self.folder.clone()))
    }

    fn fetch_named(&self, name: &str) -> Result<(), ModelError> {
        let sibling = self.sibling(name).ok_or_else(|| {
            ModelError::download(self.repo, format!("its index names '{name}', which the repository has not"))
        })?;
        self.fetch(sibling)
    }

    /// Fetches one file, unless it is here: another process may have fetched it while this one waited for the lock.
    fn fetch(&self, sibling: &Sibling) -> Result<(), ModelError> {
        let target = self.folder.join(&sibling.rfilename);
        if target.is_file() {
            return Ok(());
        }
        let lfs = sibling.lfs.as_ref();
        let sha256 = lfs.and_then(|lfs| lfs.sha256.as_ref()).map(|sha256| sha256.to_ascii_lowercase());
        let url = format!("{}/{}/resolve/main/{}", self.options.hub.endpoint, self.repo, sibling.rfilename);
        Fetch {
            agent: &self.agent,
            url: &url,
            token: self.options.hub.token.as_deref(),
            target: &target,
            bytes: lfs.and_then(|lfs| lfs.size).or(sibling.size),
            sha256: sha256.as_deref(),
            progress: self.options.progress,
        }
        .run()
    }
}
