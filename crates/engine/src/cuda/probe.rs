//! What CUDA there is on this machine. Nothing of CUDA is called before its library is known to be there.

use std::fmt;

use cudarc::driver::{result, sys};

use super::driver::{Device, Reason};

/// One card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// The N of `cuda:N`.
    pub ordinal: u32,
    /// Its maker's name for it.
    pub name: String,
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Memory in all, in bytes.
    pub memory_bytes: u64,
}

/// What was found. A card can be used when nothing is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaFound {
    /// The driver's CUDA version: major and minor.
    pub driver: Option<(u32, u32)>,
    /// Cards that the driver shows.
    pub devices: Vec<CudaDevice>,
    /// What is not there, each in a few words; empty when a card can be used.
    pub missing: Vec<String>,
}

/// The oldest driver that runs the kernels' machine code, by its CUDA version.
const OLDEST_DRIVER: (u32, u32) = (13, 0);
/// The oldest cards that the kernels are made for, by compute capability.
pub(super) const OLDEST_CAPABILITY: u32 = 80;

impl CudaFound {
    /// Looks.
    pub fn look() -> CudaFound {
        let mut found = CudaFound::default();
        // SAFETY: loading a system's own libraries, which have no other effect.
        let (driver, blas) = unsafe { (sys::is_culib_present(), cudarc::cublaslt::sys::is_culib_present()) };
        if driver {
            if let Err(reason) = found.ask_driver() {
                found.missing.push(reason);
            }
        } else {
            found.missing.push("the driver (libcuda.so.1)".to_owned());
        }
        if !blas {
            found.missing.push("cuBLASLt (libcublasLt.so.13)".to_owned());
        }
        found
    }

    fn ask_driver(&mut self) -> Result<(), String> {
        result::init().map_err(|error| format!("a driver that starts ({})", error.reason()))?;
        let mut version = 0;
        // SAFETY: the library is there, and the pointer is to an integer as it wants.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|error| error.reason())?;
        let version = version.cast_unsigned();
        let driver = (version / 1000, version % 1000 / 10);
        self.driver = Some(driver);
        if driver < OLDEST_DRIVER {
            let (major, minor) = OLDEST_DRIVER;
            return Err(format!(
                "a driver for CUDA {major}.{minor} or later (this one: {}.{})",
                driver.0, driver.1
            ));
        }
        let count = result::device::get_count().map_err(|error| error.reason())?;
        if count == 0 {
            return Err("a card that the driver shows".to_owned());
        }
        for ordinal in 0..count {
            self.devices.push(
                describe(ordinal)
                    .map_err(|error| format!("an answer of card {ordinal} ({})", error.reason()))?,
            );
        }
        if self.devices.iter().all(|device| device.capability < OLDEST_CAPABILITY) {
            return Err(format!(
                "a card of compute capability {}.{} or later",
                OLDEST_CAPABILITY / 10,
                OLDEST_CAPABILITY % 10
            ));
        }
        Ok(())
    }

    /// Whether some card can be used.
    pub fn is_usable(&self) -> bool {
        self.missing.is_empty()
    }

    /// Whether card `ordinal` can be used.
    ///
    /// # Errors
    /// What is missing, in one line.
    pub fn check(&self, ordinal: u32) -> Result<&CudaDevice, String> {
        if !self.is_usable() {
            return Err(format!("no CUDA device can be used; missing: {}", self.missing.join(", ")));
        }
        let device = self.devices.iter().find(|device| device.ordinal == ordinal).ok_or_else(|| {
            format!(
                "there is no cuda:{ordinal}: the driver shows {} device(s), from cuda:0 on",
                self.devices.len()
            )
        })?;
        if device.capability < OLDEST_CAPABILITY {
            return Err(format!(
                "cuda:{ordinal} ({}) has compute capability {}.{}; {}.{} is the least",
                device.name,
                device.capability / 10,
                device.capability % 10,
                OLDEST_CAPABILITY / 10,
                OLDEST_CAPABILITY % 10
            ));
        }
        Ok(device)
    }
}

fn describe(ordinal: i32) -> Result<CudaDevice, result::DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let device = result::device::get(ordinal)?;
    // SAFETY: the driver just named the device.
    let (major, minor, bytes) = unsafe {
        (
            result::device::get_attribute(device, MAJOR)?,
            result::device::get_attribute(device, MINOR)?,
            result::device::total_mem(device)?,
        )
    };
    Ok(CudaDevice {
        ordinal: ordinal.cast_unsigned(),
        name: result::device::get_name(device)?,
        capability: (10 * major + minor).cast_unsigned(),
        memory_bytes: bytes as u64,
    })
}

impl fmt::Display for CudaFound {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((major, minor)) = self.driver {
            write!(f, "driver for CUDA {major}.{minor}")?;
            for device in &self.devices {
                let CudaDevice { ordinal, name, capability, memory_bytes } = device;
                let (major, minor) = (capability / 10, capability % 10);
                write!(f, "; cuda:{ordinal} {name}, compute {major}.{minor}, {} GiB", memory_bytes >> 30)?;
            }
        } else {
            f.write_str("no driver")?;
        }
        match self.missing.is_empty() {
            true => Ok(()),
            false => write!(f, "; missing: {}", self.missing.join(", ")),
        }
    }
}

/// Bytes free on card `ordinal` now.
///
/// # Errors
/// Why it can't be used, in one line.
pub fn cuda_free_bytes(ordinal: u32) -> Result<u64, String> {
    CudaFound::look().check(ordinal)?;
    let (free, _) =
        Device::open(ordinal).and_then(|device| device.memory()).map_err(|error| error.to_string())?;
    Ok(free as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_is_told_what_is_missing_and_nothing_panics() {
        let found = CudaFound {
            missing: vec!["the driver (libcuda.so.1)".to_owned(), "cuBLASLt".to_owned()],
            ..CudaFound::default()
        };
        assert_eq!(found.to_string(), "no driver; missing: the driver (libcuda.so.1), cuBLASLt");
        let error = found.check(0).unwrap_err();
        assert_eq!(error, "no CUDA device can be used; missing: the driver (libcuda.so.1), cuBLASLt");
        // Whatever this machine has, looking is safe.
        let here = CudaFound::look();
        assert!(here.is_usable() || here.check(0).is_err(), "{here}");
    }

    #[test]
    fn an_old_card_and_one_that_is_not_there_are_named() {
        let device = |ordinal, capability| CudaDevice {
            ordinal,
            name: "card".to_owned(),
            capability,
            memory_bytes: 16 << 30,
        };
        let found = CudaFound {
            driver: Some((13, 0)),
            devices: vec![device(0, 90), device(1, 75)],
            missing: Vec::new(),
        };
        assert!(found.check(0).is_ok());
        assert!(found.check(1).unwrap_err().contains("compute capability 7.5; 8.0 is the least"));
        assert!(found.check(2).unwrap_err().contains("no cuda:2: the driver shows 2"));
        assert!(
            found.to_string().starts_with("driver for CUDA 13.0; cuda:0 card, compute 9.0, 16 GiB; cuda:1")
        );
    }
}
