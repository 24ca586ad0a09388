//! Taking the addresses, before anything else is done.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::Path;

use tokio::net::TcpListener;

use crate::RouterError;

/// Takes an address, or says which one and what option changes it.
pub(crate) async fn bind(address: SocketAddr, option: &'static str) -> Result<TcpListener, RouterError> {
    let failed = |source: io::Error| {
        let source = match source.kind() {
            io::ErrorKind::AddrInUse => io::Error::new(source.kind(), "another program uses this port"),
            _ => source,
        };
        RouterError::Bind { address, option, source }
    };
    TcpListener::bind(address).await.map_err(failed)
}

/// The address a listener really has.
pub(crate) fn bound(listener: &TcpListener) -> Result<SocketAddr, RouterError> {
    listener.local_addr().map_err(RouterError::system("ask for the bound address"))
}

/// Writes the address and a line feed; a reader sees either nothing or all of it.
pub(crate) fn write_address(path: &Path, address: SocketAddr) -> Result<(), RouterError> {
    let mut unfinished = OsString::from(path);
    unfinished.push(format!(".{}", std::process::id()));
    std::fs::write(&unfinished, format!("{address}\n")).map_err(RouterError::file("write", path))?;
    std::fs::rename(&unfinished, path).map_err(RouterError::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_busy_port_names_address_and_option() {
        let first = bind("127.0.0.1:0".parse().expect("address"), "--http-listen").await.expect("free");
        let address = bound(&first).expect("bound");
        let error = bind(address, "--http-listen").await.expect_err("busy").to_string();
        assert!(error.contains(&address.to_string()) && error.contains("--http-listen"), "{error}");
        assert!(error.contains("another program uses this port") && !error.contains('\n'), "{error}");
    }

    #[tokio::test]
    async fn the_address_file_holds_the_whole_address() {
        let folder = std::env::temp_dir().join(format!("baton-router-listen-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("folder");
        let path = folder.join("address");
        write_address(&path, "127.0.0.1:4321".parse().expect("address")).expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("readable"), "127.0.0.1:4321\n");
        assert_eq!(std::fs::read_dir(&folder).expect("folder").count(), 1, "no temporary file stays");
        std::fs::remove_dir_all(&folder).expect("removable");
    }
}
