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

    const fn package(self) -> &'static str {
        match self {
            Self::Jaeger => "github.com/jaegertracing/jaeger/cmd/jaeger",
            Self::Promlint => "./promlint",
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
        let module = crate::repository().join("tests/jaeger");
        let folder = crate::binary::target_dir().join("jaeger");
        std::fs::create_dir_all(&folder).map_err(|error| at(&folder, &error))?;
        let (binary, stamp) = (folder.join(self.name()), folder.join(format!("{}.built-from", self.name())));
        // Tests of several processes may want it at once.
        let lock = File::create(folder.join("lock")).map_err(|error| at(&folder, &error))?;
        lock.lock().map_err(|error| at(&folder, &error))?;
        let source = ["go.mod", "go.sum", "promlint/main.go"].map(|file| {
            std::fs::read_to_string(module.join(file)).map_err(|error| at(&module.join(file), &error))
        });
        let source = source.into_iter().collect::<Result<String, _>>()?;
        if binary.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|built_from| built_from == source) {
            return Ok(binary);
        }
        eprintln!("building {} once, which may take minutes", self.name());
        let output = Command::new("go")
            .args(["build", "-mod=readonly", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o"])
            .args([&binary, Path::new(self.package())])
            .current_dir(&module)
            .output()
            .map_err(|error| format!("go: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        std::fs::write(&stamp, source).map_err(|error| at(&stamp, &error))?;
        Ok(binary)
    }
}

fn at(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}
