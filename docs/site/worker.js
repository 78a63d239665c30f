// The search of a page that was opened from disk: browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = data => this.answered(data);
      this.inner.importScripts = (...urls) => urls.reduce((done, next) => done.then(() => this.loaded(next)), Promise.resolve());
      this.ready = this.loaded(url);
    }
    loaded(url) {
      return new Promise(resolve => {
        const script = this.inner.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = resolve;
        this.inner.document.body.append(script);
      });
    }
    answered(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
