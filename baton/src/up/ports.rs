//! Whether a port can be had, and who holds it when not.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;

use crate::exit::Failure;

/// Checks that loopback `port` is free. `option` is what the user changes when it is not.
///
/// # Errors
/// [`Failure::Bind`] with port, holder (where the system shows it) and option.
pub(crate) fn check_free(port: u16, option: &str) -> Result<(), Failure> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    // The listener is dropped at once: the router binds the port itself a moment later.
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let holder = holder(port).map_or_else(String::new, |holder| format!(" by {holder}"));
            Err(Failure::Bind(format!(
                "port {port} is in use{holder}: stop it or choose another port with {option}"
            )))
        }
        Err(error) => {
            Err(Failure::Bind(format!("port {port} can't be used ({error}): choose another with {option}")))
        }
    }
}

/// Name and number of the process that listens on `port`, if `/proc` shows it to this user.
fn holder(port: u16) -> Option<String> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let inodes: Vec<String> = tables.iter().flat_map(|table| listening_inodes(table, port)).collect();
    let wanted: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    for process in processes {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if holds_any(&process.path().join("fd"), &wanted) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("{} (process {pid})", name.trim()));
        }
    }
    None
}

fn holds_any(descriptors: &Path, wanted: &[String]) -> bool {
    let Ok(entries) = std::fs::read_dir(descriptors) else { return false };
    entries
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|target| wanted.iter().any(|socket| target.as_os_str() == socket.as_str()))
}

/// Inodes of the sockets that listen on `port` in a `/proc/net/tcp` table.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    const LISTEN: &str = "0A";
    let local = format!(":{port:04X}");
    let lines = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines
        .filter(|fields| fields.get(1).is_some_and(|address| address.ends_with(&local)))
        .filter(|fields| fields.get(3) == Some(&LISTEN))
        .filter_map(|fields| fields.get(9).map(|inode| (*inode).to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_names_port_holder_and_option() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let failure = check_free(port, "--http-port").unwrap_err();
        assert_eq!(failure.code(), 3);
        let line = failure.to_string();
        assert!(line.contains(&port.to_string()) && line.contains("--http-port"), "{line}");
        if cfg!(target_os = "linux") {
            assert!(line.contains(&format!("process {}", std::process::id())), "{line}");
        }
        drop(listener);
        // A process that another test is just starting may hold a copy for a moment.
        let mut tries = (0..200).map(|_| std::thread::sleep(std::time::Duration::from_millis(10)));
        assert!(tries.any(|()| check_free(port, "--http-port").is_ok()));
    }
}
