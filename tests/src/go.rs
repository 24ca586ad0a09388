//! Programs of the Go module in `tests/jaeger`, built once and kept in the target folder.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program of the module.
#[derive(Debug, Clone, Copy)]
pub enum Program {
    /// Jaeger itself; its first build takes minutes.
    Jaeger,
    /// What `promtool check metrics` does.
    Promlint,
}

impl Program {
    const fn name(self) -> &'static str {
        match self {
            Self::Jaeger => "jaeger",
            Self::Promlint => "promlint",
        }
    }

    /// The program, built when it is not there yet and `BATON_TEST_GO` is set; `None` after it was said why a test must do without.
    ///
    /// # Panics
    /// When the build fails, under `CI=true`.
    pub fn path_or_skip(self) -> Option<PathBuf> {
        let has_go = Command::new("go").arg("version").output().is_ok_and(|output| output.status.success());
        if !has_go {
            // A machine without Go can't have it, and that is no fault, even under CI.
            eprintln!("######## SKIPPED: no `go` here, so {} is not asked ########", self.name());
            return None;
        }
        // Hundreds of modules and many CPU-minutes, which not every run of the tests is to cost.
        if std::env::var_os("BATON_TEST_GO").is_none() && !self.is_built() {
            eprintln!(
                "######## SKIPPED: {} is not built; BATON_TEST_GO=1 builds it once ########",
                self.name()
            );
            return None;
        }
        match self.build() {
            Ok(binary) => Some(binary),
            Err(error) => {
                crate::skip(&format!("{} can't be built: {error}", self.name()));
                None
            }
        }
    }

    fn is_built(self) -> bool {
        crate::binary::target_dir().join("jaeger").join(self.name()).is_file()
    }

    fn build(self) -> Result<PathBuf, String> {
        let folder = crate::binary::target_dir().join("jaeger");
        std::fs::create_dir_all(&folder).map_err(|error| at(&folder, &error))?;
        // Tests of several processes may want it at once.
        let lock = File::create(folder.join("lock")).map_err(|error| at(&folder, &error))?;
        lock.lock().map_err(|error| at(&folder, &error))?;
        let script = crate::repository().join("tests/jaeger/build.sh");
        let output = Command::new(&script)
            .arg(&folder)
            .arg(self.name())
            .output()
            .map_err(|error| at(&script, &error))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(folder.join(self.name()))
    }
}

fn at(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
