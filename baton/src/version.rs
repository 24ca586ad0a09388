//! What this binary says it is.

/// Git revision of the source; `unknown` when it was built outside a repository.
pub(crate) const GIT_REVISION: &str = env!("BATON_GIT_REVISION");

/// One line: version, git revision, protocol version.
pub(crate) fn line() -> String {
    format!("{} (git {GIT_REVISION}, protocol {})", env!("CARGO_PKG_VERSION"), baton_proto::PROTOCOL_VERSION)
}
